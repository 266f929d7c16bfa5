// Products of a mixture of experts: each expert's matrix times the rows that were
// routed to it.
//
//   rows      out[i] = a[row of i] @ matrix of i's expert, for each assignment i
//   weights   out[e] = sum over the assignments i of e of a[row of i]^T b[row of i]
//
// Only the device knows how many rows an expert has. So the grid is the largest that any routing
// needs, every block adds up where each expert's tiles begin, and the blocks that are left over end
// at once: the launch is the same for all routings.
//
//   mma    16-bit, sm_80 on: tile, stages and warps of gemm_mma.cuh
//   simt   float32, float64, and 16-bit before sm_80: a tile of 64 x 64, a square of 4 x 4 a thread
#pragma once

#include "gemm/gemm_mma.cuh"
#include "math.cuh"
#include "moe/moe_map.cuh"
#include "ptx/capability.h"
#include "ptx/planned.cuh"

namespace cuda_ops {

// Where an operand has the row of an assignment: at its position in the order, where an expert's
// rows are neighbors and those of no expert come last, or at its number or token, from where it is
// gathered on its way into shared memory.
struct RowsAt {
  int32_t divisor;  // of a number: 0 stands for positions

  static constexpr RowsAt positions() { return {0}; }
  static constexpr RowsAt numbers() { return {1}; }
  static constexpr RowsAt tokens(int64_t top_k) { return {int32_t(top_k)}; }
  constexpr bool gathered() const { return divisor != 0; }
};

struct GroupedRows {
  const int32_t *order, *offsets;  // of MoeMap
  int32_t assignments, experts;
  int64_t n, k;  // elements of a row of out, and of a row of a
  RowsAt rows_a;
  const void *a, *b;  // b[e] is (n, k), or (k, n) if line_major_b
  bool line_major_b;
  void* out;                  // a dense row for each assignment, at its number
  bool at_positions = false;  // out has them at their positions
  void* second = nullptr;     // of a gated product: gate and up by number, or null
  int32_t* taken = nullptr;   // of Hopper's: one of MoeMap's
  bool clears = true;         // out's rows of no expert become zero; Hopper's can leave them
};

struct GroupedWeights {
  const int32_t *order, *offsets;
  int32_t assignments, experts;
  int64_t m, n;  // of each out[e]; elements of a row of a and of b
  RowsAt rows_a, rows_b;
  const void *a, *b;
  void* out;
};

// The row of the assignment at `position` of the order.
__device__ inline int32_t operand_row(const int32_t* order, RowsAt rows, int64_t position) {
  return rows.gathered() ? order[position] / rows.divisor : int32_t(position);
}

// A gated product's b has 2n lines, gates and then ups. A tile has both for the same columns: kGate
// gates and kGate ups in turn, so that a thread gets the pairs that belong together.
template <int kGate>
__device__ int64_t gated_line(int64_t line, int64_t n) {
  const int64_t column = line / (2 * kGate) * kGate + line % kGate;
  return column >= n ? -1 : line % (2 * kGate) < kGate ? column : n + column;
}

template <class T, class C>
__device__ C swiglu(C gate, C up) {
  return gate * sigmoid<MathFor<T>>(gate) * up;
}

// Stores two neighbors of a gated row: silu(gate) * up, and gate and up themselves.
template <class T, class C>
__device__ void finish_gated(const GroupedRows& p, const C (&gate)[2], const C (&up)[2],
                             int64_t row, int64_t assignment, int64_t n) {
  Place at{row * p.n + n, row, n, n < p.n, n + 1 < p.n};
  const C out[2] = {swiglu<T>(gate[0], up[0]), swiglu<T>(gate[1], up[1])};
  store_pair<T>(p.out, at, out);
  if (p.second == nullptr) return;
  at.offset = assignment * 2 * p.n + n;
  store_pair<T>(p.second, at, gate);
  at.offset += p.n;
  store_pair<T>(p.second, at, up);
}

// --- the tile -----------------------------------------------------------------

// A tile of rows: order[begin] ... order[end - 1] of one group, and its column of tiles. The last
// group are the assignments of no expert, whose products are empty sums.
struct RowTile {
  int group;
  int64_t begin, end, column;
};

// starts[g] = the first tile of rows of group g. The whole block calls it, and reads all
// numbers at once: blocks with little to do are done when that is.
__device__ inline void add_up_tiles(const int32_t* offsets, int experts, int32_t assignments,
                                    int tile, int32_t* starts) {
  for (int g = int(threadIdx.x); g <= experts; g += int(blockDim.x)) {
    const int32_t end = g < experts ? offsets[g + 1] : assignments;
    // Unsigned: one expert may have almost 2^31 of them.
    starts[g] = int32_t((unsigned(end - offsets[g]) + unsigned(tile - 1)) / unsigned(tile));
  }
  __syncthreads();
  if (threadIdx.x < 32) warp_add_up(experts + 1, starts, [&](int g) { return starts[g]; });
  __syncthreads();
}

// Tile number `index` in the order group, band of rows, column, row; it must be in `group`. Blocks
// that run together share a matrix's columns and the rows of a band, about as many of each. An
// expert with rows for a second band reads its matrix again.
__device__ inline RowTile row_tile_of(const int32_t* offsets, int experts, int32_t assignments,
                                      int tile, const int32_t* starts, int64_t columns, int group,
                                      int64_t index) {
  constexpr unsigned kBand = 16;
  // Results of 2^32 tiles are larger than any memory: no 64-bit division.
  const auto in = unsigned(index - starts[group] * columns);
  const auto at =
      tile_in_bands(in, unsigned(starts[group + 1] - starts[group]), unsigned(columns), kBand);
  const int64_t begin = offsets[group] + int64_t(at.row) * tile;
  const int64_t end = group < experts ? offsets[group + 1] : assignments;
  return {group, begin, end - begin < tile ? end : begin + tile, at.column};
}

// The same in any group.
__device__ inline RowTile row_tile(const int32_t* offsets, int experts, int32_t assignments,
                                   int tile, const int32_t* starts, int64_t columns,
                                   int64_t index) {
  int low = 0, high = experts;  // the last group that begins at or before the tile
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] * columns <= index) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return row_tile_of(offsets, experts, assignments, tile, starts, columns, low, index);
}

// --- tensor cores ---------------------------------------------------------------

// The rows of assignments as k's of a line-major operand, for the weights product.
template <class T, int kTile>
struct MmaAssignments {
  using Even = MmaOperand<T, kTile>;

  const T* from;  // the thread's columns of row 0
  const int32_t* order;
  int32_t position;  // of the next stage
  RowsAt where;
  int64_t stride;
  int offset, k, inside;
  bool vector;

  __device__ MmaAssignments(const void* rows, const int32_t* order_, int32_t position_,
                            RowsAt where_, int64_t stride_, int64_t first, bool vector_)
      : order(order_), position(position_), where(where_), stride(stride_), vector(vector_) {
    const int line = int(threadIdx.x) % (kTile / Even::kVector) * Even::kVector;
    k = int(threadIdx.x) / (kTile / Even::kVector);
    offset = k * Even::kPitchLines + line * Even::kSize;
    const int64_t rest = stride - first - line;
    inside = rest <= 0 ? 0 : rest < Even::kVector ? int(rest) : Even::kVector;
    from = static_cast<const T*>(rows) + first + line;
  }

  __device__ void fetch(uint32_t stage, int64_t k_left) {
#pragma unroll
    for (int i = 0; i < Even::kVectors; ++i) {
      const int step = k + i * Even::kStepK;
      const bool row = step < k_left;
      const T* at = from + (row ? operand_row(order, where, position + step) * stride : 0);
      const auto to = stage + uint32_t(offset + i * Even::kStepK * Even::kPitchLines);
      Even::copy(to, at, row ? inside : 0, vector, 1);
    }
    position += Even::kBlockK;
  }
};

template <class T, int kTile, bool kGated>
__global__ void __launch_bounds__(kMmaThreads, 2)
    grouped_rows_mma_kernel(const GroupedRows p, bool vector_a, bool vector_b) {
#if __CUDA_ARCH__ >= 800
  using Rows = MmaOperand<T, kTile, true>;
  using Even = MmaOperand<T, kTile>;
  using Warp = MmaWarp<kTile>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int32_t starts[kMostBins + 1];
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const Warp warp;
  const int64_t lines = kGated ? 2 * p.n : p.n, columns = (lines + kTile - 1) / kTile;
  add_up_tiles(p.offsets, p.experts, p.assignments, kTile, starts);

  // How many there are is read again rather than kept: a register less.
  for (int64_t index = blockIdx.x; index < starts[p.experts + 1] * columns; index += gridDim.x) {
    const RowTile tile =
        row_tile(p.offsets, p.experts, p.assignments, kTile, starts, columns, index);
    const int64_t first = tile.column * kTile, k = tile.group < p.experts ? p.k : 0;
    const auto row_at = [&](int row) -> int64_t {
      const int64_t i = tile.begin + row;
      return i < tile.end ? operand_row(p.order, p.rows_a, i) * p.k : -1;
    };
    Rows a(p.a, row_at, vector_a);
    const T* matrix = static_cast<const T*>(p.b) + tile.group * lines * p.k;
    float sums[Warp::kRows][Warp::kCols][4] = {};
    if constexpr (kGated) {
      const auto line_at = [&](int line) -> int64_t {
        const int64_t l = gated_line<8>(first + line, p.n);
        return l < 0 ? l : l * p.k;
      };
      Rows b(matrix, line_at, vector_b);
      mma_sums<T, MmaMode::kHalves, kTile>(a, b, false, false, k, ring, sums);
    } else {
      Even b(matrix, first, lines, p.line_major_b ? 1 : p.k, p.line_major_b ? lines : 1, vector_b,
             p.line_major_b);
      mma_sums<T, MmaMode::kHalves, kTile>(a, b, false, p.line_major_b, k, ring, sums);
    }

#pragma unroll
    for (int i = 0; i < Warp::kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = tile.begin + warp.row(i, half);
        if (row >= tile.end) continue;
        const int64_t assignment = p.order[row], to = p.at_positions ? row : assignment;
#pragma unroll
        for (int j = 0; j < Warp::kCols; j += kGated ? 2 : 1) {
          const float pair[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
          if constexpr (kGated) {
            const float up[2] = {sums[i][j + 1][2 * half], sums[i][j + 1][2 * half + 1]};
            // 8 gates, then their 8 ups: half as many columns lie before them.
            const int64_t n = (first + warp.n + 8 * j) / 2 + warp.lane % 4 * 2;
            finish_gated<T>(p, pair, up, to, assignment, n);
          } else {
            const int64_t n = first + warp.col(j);
            store_pair<T>(p.out, {to * p.n + n, to, n, n < p.n, n + 1 < p.n}, pair);
          }
        }
      }
    }
  }
#endif
}

template <class T, int kTile>
__global__ void __launch_bounds__(kMmaThreads, 2)
    grouped_weights_mma_kernel(const GroupedWeights p, bool vector_a, bool vector_b) {
#if __CUDA_ARCH__ >= 800
  using Operand = MmaAssignments<T, kTile>;
  using Warp = MmaWarp<kTile>;
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const Warp warp;
  const int64_t tiles_m = (p.m + kTile - 1) / kTile, tiles_n = (p.n + kTile - 1) / kTile;

  for (int64_t tile = blockIdx.x; tile < p.experts * tiles_m * tiles_n; tile += gridDim.x) {
    const int64_t expert = tile / (tiles_m * tiles_n);
    const int64_t first_m = tile % tiles_m * kTile, first_n = tile / tiles_m % tiles_n * kTile;
    const int32_t begin = p.offsets[expert], count = p.offsets[expert + 1] - begin;
    Operand a(p.a, p.order, begin, p.rows_a, p.m, first_m, vector_a);
    Operand b(p.b, p.order, begin, p.rows_b, p.n, first_n, vector_b);
    float sums[Warp::kRows][Warp::kCols][4] = {};
    mma_sums<T, MmaMode::kHalves, kTile>(a, b, true, true, count, ring, sums);

#pragma unroll
    for (int i = 0; i < Warp::kRows; ++i) {
#pragma unroll
      for (int j = 0; j < Warp::kCols; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t m = first_m + warp.row(i, half), n = first_n + warp.col(j);
          const float pair[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
          const bool row = m < p.m;
          const int64_t at = (expert * p.m + m) * p.n + n;
          store_pair<T>(p.out, {at, m, n, row && n < p.n, row && n + 1 < p.n}, pair);
        }
      }
    }
  }
#endif
}

// --- multiply-adds --------------------------------------------------------------

// From 8.0 on, 16-bit types come here only where there are no k's, for empty sums.
template <class T>
constexpr bool kEmptySums = sizeof(T) == 2 && kPlannedFrom80;

constexpr int kGroupedTile = 64, kGroupedK = 8, kGroupedThreads = 256;

// A tile of a @ b over all of K: a(line, k) and b(line, k) are elements, or 0 outside.
// Threads 16 x 16, each with 4 neighboring lines of both.
template <class C, class A, class B>
__device__ void grouped_simt_sums(const A& a, const B& b, int64_t k, C (&sums)[4][4]) {
  // 4 elements of padding keep lines aligned and 8 k's on different banks.
  __shared__ C shared_a[kGroupedK][kGroupedTile + 4], shared_b[kGroupedK][kGroupedTile + 4];
  const int thread = int(threadIdx.x), row = thread / 16 * 4, col = thread % 16 * 4;
  for (int64_t first = 0; first < k; first += kGroupedK) {
    __syncthreads();  // what was there has been read
#pragma unroll
    for (int i = thread; i < kGroupedTile * kGroupedK; i += kGroupedThreads) {
      const int k_a = A::kAlongK ? i % kGroupedK : i / kGroupedTile;
      const int line_a = A::kAlongK ? i / kGroupedK : i % kGroupedTile;
      shared_a[k_a][line_a] = first + k_a < k ? a(line_a, first + k_a) : C(0);
      const int k_b = B::kAlongK ? i % kGroupedK : i / kGroupedTile;
      const int line_b = B::kAlongK ? i / kGroupedK : i % kGroupedTile;
      shared_b[k_b][line_b] = first + k_b < k ? b(line_b, first + k_b) : C(0);
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kGroupedK; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[i][j] = fma(shared_a[step][row + i], shared_b[step][col + j], sums[i][j]);
        }
      }
    }
  }
}

// Lines that begin at begins[line], or are empty if that is below 0; k's are `stride` apart.
template <class T, bool kAlong>
struct SimtLines {
  static constexpr bool kAlongK = kAlong;
  const T* memory;
  const int64_t* begins;
  int64_t stride;
  __device__ compute_t<T> operator()(int line, int64_t k) const {
    return begins[line] < 0 ? compute_t<T>(0) : to_compute(memory[begins[line] + k * stride]);
  }
};

// The rows of assignments as k's.
template <class T>
struct SimtAssignments {
  static constexpr bool kAlongK = false;
  const T* rows;
  const int32_t* order;
  int32_t begin;
  RowsAt where;
  int64_t stride, first;
  __device__ compute_t<T> operator()(int line, int64_t k) const {
    if (first + line >= stride) return compute_t<T>(0);
    return to_compute(rows[operand_row(order, where, begin + k) * stride + first + line]);
  }
};

template <class T, bool kGated, bool kLineMajorB>
__global__ void __launch_bounds__(kGroupedThreads) grouped_rows_simt_kernel(const GroupedRows p) {
  using C = compute_t<T>;
  __shared__ int32_t starts[kMostBins + 1];
  __shared__ int64_t begins_a[kGroupedTile], begins_b[kGroupedTile];
  const int thread = int(threadIdx.x);
  const int64_t lines = kGated ? 2 * p.n : p.n, columns = (lines + kGroupedTile - 1) / kGroupedTile;
  add_up_tiles(p.offsets, p.experts, p.assignments, kGroupedTile, starts);
  const int64_t tiles = starts[p.experts + 1] * columns;

  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const RowTile tile =
        row_tile(p.offsets, p.experts, p.assignments, kGroupedTile, starts, columns, index);
    const int64_t first = tile.column * kGroupedTile;
    const int64_t k = tile.group < p.experts && !kEmptySums<T> ? p.k : 0;
    __syncthreads();  // the last tile's lines have been read
    if (thread < kGroupedTile) {
      const int64_t i = tile.begin + thread, line = first + thread;
      begins_a[thread] = i < tile.end ? operand_row(p.order, p.rows_a, i) * p.k : -1;
      const int64_t l = kGated ? gated_line<2>(line, p.n) : line < lines ? line : -1;
      begins_b[thread] = l < 0 ? -1 : kLineMajorB ? l : l * p.k;
    }
    __syncthreads();
    const T* matrix = static_cast<const T*>(p.b) + tile.group * lines * p.k;
    const SimtLines<T, true> a{static_cast<const T*>(p.a), begins_a, 1};
    const SimtLines<T, !kLineMajorB> b{matrix, begins_b, kLineMajorB ? lines : 1};
    C sums[4][4] = {};
    grouped_simt_sums(a, b, k, sums);

#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = tile.begin + thread / 16 * 4 + i;
      if (row >= tile.end) continue;
      const int64_t assignment = p.order[row], to = p.at_positions ? row : assignment;
      const int64_t line = first + thread % 16 * 4;
      const C left[2] = {sums[i][0], sums[i][1]}, right[2] = {sums[i][2], sums[i][3]};
      if constexpr (kGated) {
        finish_gated<T>(p, left, right, to, assignment, line / 2);
      } else {
        const int64_t at = to * p.n + line;
        store_pair<T>(p.out, {at, row, line, line < p.n, line + 1 < p.n}, left);
        store_pair<T>(p.out, {at + 2, row, line + 2, line + 2 < p.n, line + 3 < p.n}, right);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kGroupedThreads)
    grouped_weights_simt_kernel(const GroupedWeights p) {
  using C = compute_t<T>;
  const int64_t tiles_m = (p.m + kGroupedTile - 1) / kGroupedTile;
  const int64_t tiles_n = (p.n + kGroupedTile - 1) / kGroupedTile;
  for (int64_t tile = blockIdx.x; tile < p.experts * tiles_m * tiles_n; tile += gridDim.x) {
    const int64_t expert = tile / (tiles_m * tiles_n);
    const int64_t first_m = tile % tiles_m * kGroupedTile;
    const int64_t first_n = tile / tiles_m % tiles_n * kGroupedTile;
    const int32_t begin = p.offsets[expert], count = p.offsets[expert + 1] - begin;
    const SimtAssignments<T> a{static_cast<const T*>(p.a), p.order, begin, p.rows_a, p.m, first_m};
    const SimtAssignments<T> b{static_cast<const T*>(p.b), p.order, begin, p.rows_b, p.n, first_n};
    C sums[4][4] = {};
    grouped_simt_sums(a, b, kEmptySums<T> ? 0 : count, sums);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t m = first_m + int(threadIdx.x) / 16 * 4 + i;
      if (m >= p.m) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t n = first_n + int(threadIdx.x) % 16 * 4 + j;
        if (n >= p.n) continue;
        static_cast<T*>(p.out)[(expert * p.m + m) * p.n + n] = from_compute<T>(sums[i][j]);
      }
    }
  }
}

// --- launch -------------------------------------------------------------------

// One dim for everything: y and z end at 65535. Blocks step over the rest.
inline unsigned grouped_grid(int64_t tiles) {
  return unsigned(tiles < INT32_MAX ? tiles : INT32_MAX);
}

// Rows of `size`-byte elements at multiples of 16 bytes.
inline bool grouped_vectors(const void* memory, int64_t row, size_t size) {
  return is_aligned(memory, 16) && row * int64_t(size) % 16 == 0;
}

template <class Kernel, class Problem>
cudaError_t grouped_mma_launch(Kernel kernel, int operand_bytes, int64_t tiles, const Problem& p,
                               bool vector_a, bool vector_b, cudaStream_t stream) {
  const int bytes = kMmaStages * 2 * operand_bytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<grouped_grid(tiles), kMmaThreads, unsigned(bytes), stream>>>(p, vector_a, vector_b);
  return cudaGetLastError();
}

// out[i] = a[row of i] @ b[e], or silu(gate) * up of its two halves. `mma`: on the tensor cores,
// for 16-bit types.
template <class T, bool kGated = false>
cudaError_t grouped_rows(const GroupedRows& p, bool mma, cudaStream_t stream) {
  const int64_t lines = kGated ? 2 * p.n : p.n;
  const auto tiles = [&](int tile) {
    return grouped_row_tiles(p.assignments, p.experts, tile) * ((lines + tile - 1) / tile);
  };
  if (p.assignments == 0 || lines == 0) return cudaSuccess;
  if constexpr (sizeof(T) == 2) {
    const bool vector_a = grouped_vectors(p.a, p.k, sizeof(T));
    const bool vector_b = grouped_vectors(p.b, p.line_major_b ? lines : p.k, sizeof(T));
    const auto run = [&](auto kernel, int bytes, int tile) {
      return grouped_mma_launch(kernel, bytes, tiles(tile), p, vector_a, vector_b, stream);
    };
    if (mma) {
      return grouped_tile(p.assignments, p.experts, lines, current_device()) == 128
                 ? run(grouped_rows_mma_kernel<T, 128, kGated>, MmaOperand<T, 128>::kBytes, 128)
                 : run(grouped_rows_mma_kernel<T, 64, kGated>, MmaOperand<T, 64>::kBytes, 64);
    }
  }
  auto kernel = grouped_rows_simt_kernel<T, kGated, false>;
  if constexpr (!kGated) {
    if (p.line_major_b) kernel = grouped_rows_simt_kernel<T, false, true>;
  }
  kernel<<<grouped_grid(tiles(kGroupedTile)), kGroupedThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

// An expert without assignments gets zeros.
template <class T>
cudaError_t grouped_weights(const GroupedWeights& p, bool mma, cudaStream_t stream) {
  const auto tiles = [&](int tile) {
    return p.experts * ((p.m + tile - 1) / tile) * ((p.n + tile - 1) / tile);
  };
  if (tiles(1) == 0) return cudaSuccess;
  if constexpr (sizeof(T) == 2) {
    const bool vector_a = grouped_vectors(p.a, p.m, sizeof(T));
    const bool vector_b = grouped_vectors(p.b, p.n, sizeof(T));
    const auto run = [&](auto kernel, int bytes, int tile) {
      return grouped_mma_launch(kernel, bytes, tiles(tile), p, vector_a, vector_b, stream);
    };
    if (mma) {
      return tiles(128) >= current_device().sms
                 ? run(grouped_weights_mma_kernel<T, 128>, MmaOperand<T, 128>::kBytes, 128)
                 : run(grouped_weights_mma_kernel<T, 64>, MmaOperand<T, 64>::kBytes, 64);
    }
  }
  const unsigned grid = grouped_grid(tiles(kGroupedTile));
  grouped_weights_simt_kernel<T><<<grid, kGroupedThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace cuda_ops
