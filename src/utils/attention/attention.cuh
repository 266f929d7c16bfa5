// Attention without a matrix of scores in memory, as FlashAttention-2 does it (Dao,
// https://arxiv.org/abs/2307.08691): a block keeps the scores of its rows with a few rows of the
// other side in registers, and goes on to the next ones. The forward owns queries and walks over
// keys: softmax as it goes, since a larger score scales down what was added up before.
//
// Halves are multiplied by tensor cores (mma.sync), wider dtypes by multiply-adds that lie in
// threads the same way: of 16 rows, this thread has rows lane / 4 and that + 8, and of each 8
// columns, columns lane % 4 * 2 and the next, as
//   sums[block of 16 rows][block of 8 columns][2 * (second row) + (second column)]
#pragma once

#include "attention/attention.h"
#include "dtype.cuh"
#include "math.cuh"
#include "ptx/capability.h"
#include "ptx/cp_async.cuh"
#include "ptx/early_start.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"

namespace cuda_ops {

constexpr double kLn2 = 0.6931471805599453;

// --- rows in shared memory ------------------------------------------------------

// Rows of kDim elements. Their vectors of 16 bytes are swapped, so that those of 8 rows at one
// column are in different banks.
template <class T, int kDim>
struct AttentionRows {
  static constexpr int kVector = 16 / int(sizeof(T)), kVectors = kDim / kVector;
  static constexpr int kBytes = kDim * int(sizeof(T));  // of a row
  using Vector = Elements<T, kVector>;

  uint8_t* memory;

  __device__ static int offset(int row, int vector) {
    return row * kBytes + (vector ^ (row % 8)) * 16;
  }
  __device__ uint32_t address(int row, int vector) const {
    return uint32_t(__cvta_generic_to_shared(memory)) + uint32_t(offset(row, vector));
  }
  // Where this lane finds its row of four 8 x 8 matrices: rows from `row` on, a multiple of 8, and
  // columns from 0 on. `sixteen` below goes to later columns.
  __device__ uint32_t fragment(int row) const {
    const int lane = int(threadIdx.x) % 32;
    return address(row + lane % 16, lane / 16);
  }
  __device__ Vector vector(int row, int vector) const {
    return *reinterpret_cast<const Vector*>(memory + offset(row, vector));
  }
  // For a column that is even.
  __device__ Elements<T, 2> pair(int row, int column) const {
    const int within = column % kVector * int(sizeof(T));
    return *reinterpret_cast<const Elements<T, 2>*>(memory + offset(row, column / kVector) +
                                                    within);
  }

  // Starts to copy rows from `first` on; those from `rows` on and columns from `dim` on are zeros.
  template <int kRows, int kThreads>
  __device__ void fetch(const T* from, int64_t step, int64_t first, int64_t rows, int dim,
                        bool vectors) const {
    // Threads lie along a row, one or several times, or along several rows.
    constexpr int kAcross = kVectors > kThreads ? kVectors / kThreads : 1;
    constexpr int kDown = kVectors > kThreads ? 1 : kThreads / kVectors;
    // Rows that are eight apart swap their vectors alike: places that a loop goes on from.
    constexpr int kPlaces = kDown < 8 ? 8 / kDown : 1, kTurns = kRows / kDown / kPlaces;
    static_assert(kRows % (kDown * kPlaces) == 0, "each thread has as many vectors");
    const int begin = int(threadIdx.x) / kVectors,
              left = (rows - first < kRows ? int(rows - first) : kRows) - begin;
#pragma unroll
    for (int across = 0; across < kAcross; ++across) {
      const int at = int(threadIdx.x) % kVectors + across * kThreads;
      const int inside = dim - at * kVector;
      const int count = inside < 0 ? 0 : inside < kVector ? inside : kVector;
      const T* line = from + (first + begin) * step + at * kVector;
      int places[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) places[i] = offset(begin + i * kDown, at);
      constexpr int kUnrolled = kThreads == 32 && kBytes <= 256 ? 2 : 1;  // more takes registers
      const auto each = [&](auto copy) {
#pragma unroll kUnrolled
        for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
          for (int i = 0; i < kPlaces; ++i, line += kDown * step) {
            const int row = (turn * kPlaces + i) * kDown;  // from `begin` on
            copy(memory + places[i] + row / 8 * 8 * kBytes, line, row < left ? count : 0);
          }
        }
      };
      // A block of one warp has nothing to do meanwhile, and zeros cost each copy ten instructions.
      if (kThreads == 32 && vectors && dim == kDim && rows - first >= kRows) {
        each([&](uint8_t* to, const T* line, int) {
          cp_async(uint32_t(__cvta_generic_to_shared(to)), line, 16);
        });
      } else if (vectors) {
        each([&](uint8_t* to, const T* line, int there) {
          cp_async(uint32_t(__cvta_generic_to_shared(to)), there > 0 ? line : from,
                   there * int(sizeof(T)));
        });
      } else {
        each([&](uint8_t* to, const T* line, int there) {
          Vector values{};
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            if (e < there) values.values[e] = line[e];
          }
          *reinterpret_cast<Vector*>(to) = values;
        });
      }
    }
  }
};

// From a fragment to that of `count` times 16 columns further: in one instruction, as rows are
// aligned, so that no register keeps it.
__device__ inline uint32_t sixteen(uint32_t fragment, int count) {
  return (fragment ^ uint32_t(count % 4 * 32)) + uint32_t(count / 4 * 128);
}

__device__ inline uint8_t* aligned_rows(uint8_t* shared) {
  const auto at = uint32_t(__cvta_generic_to_shared(shared));
  return shared + (0 - at) % kAttentionAlignment;
}

// --- products -------------------------------------------------------------------

// sums += owned @ streamed^T over all of kDim: the rows of `owned` from `first` on by kStream rows.
template <class T, int kDim, int kBlocks, int kStream>
__device__ __forceinline__ void multiply_rows(AttentionRows<T, kDim> owned, int first,
                                              AttentionRows<T, kDim> streamed,
                                              compute_t<T> (&sums)[kBlocks][kStream / 8][4]) {
  if constexpr (sizeof(T) == 2) {
    static_assert(kStream % 16 == 0, "fragments have 16 rows");
    const uint32_t left = owned.fragment(first), right = streamed.fragment(0);
    constexpr int kBytes = AttentionRows<T, kDim>::kBytes;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        load_matrices(sixteen(left, k) + uint32_t(16 * i * kBytes), a[i]);
      }
#pragma unroll
      for (int j = 0; j < kStream / 16; ++j) {
        uint32_t b[4];
        load_matrices(sixteen(right, k) + uint32_t(16 * j * kBytes), b);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          mma(sums[i][2 * j], a[i], b[0], b[2], T{});
          mma(sums[i][2 * j + 1], a[i], b[1], b[3], T{});
        }
      }
    }
  } else {
    static_assert(kBlocks == 1, "one block of 16 rows");
    using Rows = AttentionRows<T, kDim>;
    const int lane = int(threadIdx.x) % 32, row = first + lane / 4, other = lane % 4 * 2;
#pragma unroll 1
    for (int k = 0; k < Rows::kVectors; ++k) {
      const auto low = owned.vector(row, k), high = owned.vector(row + 8, k);
#pragma unroll
      for (int j = 0; j < kStream / 8; ++j) {
        const auto even = streamed.vector(8 * j + other, k);
        const auto odd = streamed.vector(8 * j + other + 1, k);
#pragma unroll
        for (int e = 0; e < Rows::kVector; ++e) {
          sums[0][j][0] += low.values[e] * even.values[e];
          sums[0][j][1] += low.values[e] * odd.values[e];
          sums[0][j][2] += high.values[e] * even.values[e];
          sums[0][j][3] += high.values[e] * odd.values[e];
        }
      }
    }
  }
}

// sums += weights @ streamed: weights by kStream rows, of which the columns from `column` on.
template <class T, int kDim, int kBlocks, int kStream, int kColumns>
__device__ __forceinline__ void multiply_columns(
    const compute_t<T> (&weights)[kBlocks][kStream / 8][4], AttentionRows<T, kDim> streamed,
    int column, compute_t<T> (&sums)[kBlocks][kColumns / 8][4]) {
  if constexpr (sizeof(T) == 2) {
    constexpr int kBytes = AttentionRows<T, kDim>::kBytes;
    const uint32_t right = sixteen(streamed.fragment(0), column / 16);  // a multiple of 64
#pragma unroll
    for (int k = 0; k < kStream / 16; ++k) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const auto& of = weights[i][2 * k + word / 2];
          a[i][word] = from_compute(of[word % 2 * 2], of[word % 2 * 2 + 1], T{});
        }
      }
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        uint32_t b[4];
        load_transposed(sixteen(right, j) + uint32_t(16 * k * kBytes), b);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          mma(sums[i][2 * j], a[i], b[0], b[1], T{});
          mma(sums[i][2 * j + 1], a[i], b[2], b[3], T{});
        }
      }
    }
  } else {
    static_assert(kBlocks == 1, "one block of 16 rows");
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int block = 0; block < kStream / 8; ++block) {
#pragma unroll 1
      for (int two = 0; two < 4; ++two) {
        const int owner = lane / 4 * 4 + two;  // of the weights of these two rows
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const auto low = __shfl_sync(~0u, weights[0][block][odd], owner);
          const auto high = __shfl_sync(~0u, weights[0][block][odd + 2], owner);
          const int row = 8 * block + 2 * two + odd;
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            const auto values = streamed.pair(row, column + 8 * j + lane % 4 * 2);
            sums[0][j][0] += low * values.values[0];
            sums[0][j][1] += low * values.values[1];
            sums[0][j][2] += high * values.values[0];
            sums[0][j][3] += high * values.values[1];
          }
        }
      }
    }
  }
}

// 2^x, as exact as the results need.
template <class T>
__device__ compute_t<T> attention_power(compute_t<T> x) {
  if constexpr (sizeof(T) == 2) {
    return Coarse::power(x);
  } else {
    return ::exp2(x);
  }
}

// Two neighbors of a row of a dense result, at a column that is even.
template <class T>
__device__ void store_neighbors(T* row, int column, int dim, compute_t<T> first,
                                compute_t<T> second) {
  const Elements<T, 2> values{{from_compute<T>(first), from_compute<T>(second)}};
  if (column + 1 < dim && dim % 2 == 0) {
    *reinterpret_cast<Elements<T, 2>*>(row + column) = values;
    return;
  }
  if (column < dim) row[column] = values.values[0];
  if (column + 1 < dim) row[column + 1] = values.values[1];
}

// --- forward --------------------------------------------------------------------

// Writes a query's result and its lse; or where blocks share its keys, what this one found. `sums`
// are four of each 8 columns, as above, and `out` is where the head's results begin. `most` is the
// largest score, in units of log2, and `whole` the sum of weights.
template <class T, int kColumns>
__device__ __forceinline__ void store_attended(const Attention& p, const compute_t<T>* sums,
                                               int half, int64_t split, int64_t head, int64_t out,
                                               int64_t query, int part, compute_t<T> most,
                                               compute_t<T> whole) {
  using C = compute_t<T>;
  const int lane = int(threadIdx.x) % 32, dim = p.shape.dim;
  const C inverse = whole == 0 ? C(0) : 1 / whole;
  const bool is_partial = p.plan.splits > 1;
  const int64_t row = (split * p.heads.numel + head) * p.shape.queries + query;  // of partials
  const auto store = [&](auto* to) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      store_neighbors(to, part * kColumns + 8 * j + lane % 4 * 2, dim,
                      sums[4 * j + 2 * half] * inverse, sums[4 * j + 2 * half + 1] * inverse);
    }
  };
  if (is_partial) {
    store(static_cast<C*>(p.partial_out) + row * dim);
  } else {
    store(static_cast<T*>(p.heads.operands[0].data) + out + query * dim);
  }
  if (part == 0 && lane % 4 == 0) {
    static_cast<C*>(is_partial ? p.partial_lse : p.lse)[row] =
        whole == 0 ? C(-INFINITY) : most * C(kLn2) + ::log(whole);
  }
}

template <class T, int kDim, bool kFew>
__global__ void __launch_bounds__(attention_tile(sizeof(T), kDim, kFew).threads())
    attention_kernel(const __grid_constant__ Attention p, int64_t tiles) {
#if __CUDA_ARCH__ >= 800
  using C = compute_t<T>;
  using Rows = AttentionRows<T, kDim>;
  constexpr AttentionTile kTile = attention_tile(sizeof(T), kDim, kFew);
  constexpr int kBlocks = kTile.blocks, kStream = kTile.stream, kColumns = kTile.columns;
  constexpr int kThreads = kTile.threads(), kOwned = kTile.rows(), kParts = kTile.parts();
  extern __shared__ __align__(16) uint8_t memory_of_block[];
  uint8_t* const shared = aligned_rows(memory_of_block);
  const Rows queries{shared}, keys{shared + kOwned * Rows::kBytes};
  const Rows values{keys.memory + kStream * Rows::kBytes};
  const AttentionShape& shape = p.shape;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 * 16 * kBlocks;
  const int64_t row_tiles = (shape.queries + kOwned - 1) / kOwned;
  const C scale = C(shape.scale * kLog2E);

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // The last queries see the most keys, so they begin.
    const int64_t part = tile % kParts, split = tile / kParts % p.plan.splits;
    const int64_t place = tile / kParts / p.plan.splits, row_tile = place % row_tiles;
    const int64_t first = (row_tiles - 1 - row_tile) * kOwned, head = place / row_tiles;
    const auto at = p.heads.offsets_at(head);
    const auto memory = [&](int i) {
      return static_cast<const T*>(p.heads.operands[i].data) + at[i];
    };
    const T *k = memory(2), *v = memory(3);
    const int64_t begin = split * p.plan.keys, seen = shape.seen(first + kOwned);
    const int64_t end = seen < begin + p.plan.keys ? seen : begin + p.plan.keys;
    const auto fetch = [&](Rows rows, const T* from, int64_t step, int64_t key) {
      rows.template fetch<kStream, kThreads>(from, step, key, shape.keys, shape.dim, shape.vectors);
    };

    __syncthreads();  // the last tile's rows have been read
    queries.template fetch<kOwned, kThreads>(memory(1), p.q_step, first, shape.queries, shape.dim,
                                             shape.vectors);
    if (end > begin) fetch(keys, k, p.k_step, begin);
    cp_async_commit();

    C sums[kBlocks][kColumns / 8][4] = {}, most[kBlocks][2], total[kBlocks][2] = {};
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) most[i][0] = most[i][1] = -INFINITY;

    for (int64_t key = begin; key < end; key += kStream) {
      cp_async_wait<0>();
      __syncthreads();  // keys are there, and the last values have been read
      fetch(values, v, p.v_step, key);
      cp_async_commit();
      C scores[kBlocks][kStream / 8][4] = {};
      multiply_rows<T, kDim, kBlocks, kStream>(queries, warp, keys, scores);
      cp_async_wait<0>();
      __syncthreads();  // values are there, and keys have been read
      if (key + kStream < end) fetch(keys, k, p.k_step, key + kStream);
      cp_async_commit();

      // Scores in units of log2, so that weights are powers of 2.
#pragma unroll
      for (int i = 0; i < kBlocks * kStream / 2; ++i) (&scores[0][0][0])[i] *= scale;
      if (shape.seen_from(key, first + warp, kStream) < kStream) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int64_t row = first + warp + 16 * i + 8 * half + lane / 4;
            const int seen = shape.seen_from(key, row, kStream) - lane % 4 * 2;
#pragma unroll
            for (int c = 0; c < kStream / 4; ++c) {
              if (c / 2 * 8 + c % 2 >= seen) scores[i][c / 2][2 * half + c % 2] = -INFINITY;
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          C largest = most[i][half];
#pragma unroll
          for (int c = 0; c < kStream / 4; ++c) {
            largest = fmax(largest, scores[i][c / 2][2 * half + c % 2]);
          }
          largest = fmax(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = fmax(largest, __shfl_xor_sync(~0u, largest, 2));
          // No score is above -inf yet: there is no difference to it.
          const C base = largest == -INFINITY ? C(0) : largest;
          const C shrunk = attention_power<T>(most[i][half] - base);
          most[i][half] = largest;
          C added = 0;
#pragma unroll
          for (int c = 0; c < kStream / 4; ++c) {
            C& score = scores[i][c / 2][2 * half + c % 2];
            score = attention_power<T>(score - base);
            added += score;
          }
          total[i][half] = total[i][half] * shrunk + added;
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            sums[i][j][2 * half] *= shrunk;
            sums[i][j][2 * half + 1] *= shrunk;
          }
        }
      }
      multiply_columns<T, kDim, kBlocks, kStream, kColumns>(scores, values, int(part) * kColumns,
                                                            sums);
    }
    cp_async_wait<0>();
    if (tile + gridDim.x >= tiles) let_next_start();  // what puts the parts together

#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t query = first + warp + 16 * i + 8 * half + lane / 4;
        const C whole = lanes_total(total[i][half], 4);
        if (query >= shape.queries) continue;
        store_attended<T, kColumns>(p, &sums[i][0][0], half, split, head, at[0], query, int(part),
                                    most[i][half], whole);
      }
    }
  }
#endif
}

constexpr int kMergeThreads = 256;

// What blocks that shared the keys of a query found, put together: a block for each query, whose
// warps take turns at the splits.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    attention_merge_kernel(const __grid_constant__ Attention p, int64_t rows) {
  using C = compute_t<T>;
  constexpr int kWarps = kMergeThreads / 32, kEach = kMostHeadDim / 32;
  __shared__ C shared[kWarps][kMostHeadDim];
  __shared__ C totals[kWarps];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int dim = p.shape.dim, splits = int(p.plan.splits);
  const C *found = static_cast<const C*>(p.partial_out),
          *lse = static_cast<const C*>(p.partial_lse);
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    C most = -INFINITY;
    for (int s = lane; s < splits; s += 32) most = fmax(most, lse[s * rows + row]);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      most = fmax(most, __shfl_xor_sync(~0u, most, other));
    }
    const C base = most == -INFINITY ? C(0) : most;  // no split saw a key
    C sums[kEach] = {}, total = 0;
    for (int s = warp; s < splits; s += kWarps) {
      const C weight = ::exp(lse[s * rows + row] - base);
      total += weight;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int column = lane + 32 * e;
        if (column < dim) sums[e] += weight * found[(s * rows + row) * dim + column];
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) shared[warp][lane + 32 * e] = sums[e];
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    C whole = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) whole += totals[w];
    const int64_t head = row / p.shape.queries, query = row % p.shape.queries;
    T* const out =
        static_cast<T*>(p.heads.operands[0].data) + p.heads.offsets_at(head)[0] + query * dim;
    for (int column = int(threadIdx.x); column < dim; column += kMergeThreads) {
      C sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared[w][column];
      out[column] = from_compute<T>(whole == 0 ? C(0) : sum / whole);
    }
    if (threadIdx.x == 0) {
      static_cast<C*>(p.lse)[row] = whole == 0 ? C(-INFINITY) : base + ::log(whole);
    }
    __syncthreads();  // sums have been read
  }
}

}  // namespace cuda_ops
