// The matrix product on the tensor cores of every GPU from sm_80 on: cp.async
// copies, mma.sync multiplies. Hopper runs it too, for small matrices that its copy
// engine cannot read (rows that do not start at multiples of 16 bytes, steps in
// both dims), and in tf32 for small ones that are not K-major.
//
//   block   256 threads, a tile of kTile x kTile of out, 4 stages of 64 bytes of K
//   warp    1/2 of the rows by 1/4 of the columns
//
// A stage holds each operand the way it lies in memory, so that its copies are
// whole 16-byte vectors, padded so that no bank is hit twice:
//
//   K-major     kTile lines of  64 bytes of K, 16 of padding
//   line-major  64 / size k's of kTile lines, 16 bytes of padding (32 for floats)
#pragma once

#include "gemm/gemm_epilogue.cuh"
#include "gemm/matmul.h"
#include "ptx/mma.cuh"
#include "ptx/planned.cuh"
#include "ptx/tf32.cuh"
#include "gemm/tile_order.cuh"

namespace cuda_ops {

// How floats are multiplied. kTF32x3 splits each into two tf32, high + low, and
// adds three products: the lost one, low * low, is below the rounding of a float.
enum class MmaMode { kHalves, kTF32, kTF32x3 };

constexpr int kMmaThreads = 256, kMmaStages = 4, kMmaBytesK = 64;

struct MmaArgs {
  int64_t tiles_m, tiles_n, tiles;
  void* second;
  // 16-byte copies are possible; which way the operand lies.
  bool vector_a, vector_b, line_major_a, line_major_b;
};

struct TileOrigin {
  int64_t m, n, batch;
};

template <int kRows, int kColumns>
__device__ TileOrigin tile_origin(const MmaArgs& args, int64_t tile) {
  const int64_t matrix = args.tiles_m * args.tiles_n;
  const auto at = tile_in_bands<int64_t>(tile % matrix, args.tiles_m, args.tiles_n, 8);
  return {at.row * kRows, at.column * kColumns, tile / matrix};
}

// --- global to shared ---------------------------------------------------------

// One operand of one tile on its way, a vector of 16 bytes at a time: by cp.async
// where vectors are aligned in memory, else element by element.
// Lines are at equal distances, or `kGather`: K-major ones that lie anywhere.
template <class T, int kTile, bool kGather = false>
struct MmaOperand {
  static constexpr int kSize = int(sizeof(T)), kVector = 16 / kSize, kBlockK = kMmaBytesK / kSize;
  static constexpr int kVectors = kTile * kBlockK / kVector / kMmaThreads;
  static constexpr int kPitchK = kMmaBytesK + 16;
  static constexpr int kPitchLines = kTile * kSize + (kSize == 4 ? 32 : 16);
  static constexpr int kBytes =
      kTile * kPitchK > kBlockK* kPitchLines ? kTile * kPitchK : kBlockK * kPitchLines;
  static_assert(kVectors >= 1, "more threads than vectors");
  // From one vector of a thread to its next: lines of K-major, k's of line-major.
  static constexpr int kLineStep = kMmaThreads / (kBlockK / kVector);
  static constexpr int kStepK = kMmaThreads / (kTile / kVector);

  const T* from;  // the first vector of the next stage
  int64_t line_stride, k_stride;
  int64_t step;             // elements of memory, and
  int offset, shared_step;  // bytes of shared memory, from one vector to the next
  int k;
  bool vector, line_major;
  int left[kVectors];                     // elements of the vector, or of its line, that are inside
  int64_t begin[kGather ? kVectors : 1];  // of each vector's line, where those lie anywhere

  __device__ MmaOperand(const void* matrix, int64_t first, int64_t lines, int64_t line_stride_,
                        int64_t k_stride_, bool vector_, bool line_major_)
      : line_stride(line_stride_), k_stride(k_stride_), vector(vector_), line_major(line_major_) {
    const int index = int(threadIdx.x);
    int line;
    if (line_major) {
      line = index % (kTile / kVector) * kVector;
      k = index / (kTile / kVector);
      offset = k * kPitchLines + line * kSize;
      shared_step = kStepK * kPitchLines;
      step = kStepK * k_stride;
    } else {
      line = index / (kBlockK / kVector);
      k = index % (kBlockK / kVector) * kVector;
      offset = line * kPitchK + k * kSize;
      shared_step = kLineStep * kPitchK;
      step = kLineStep * line_stride;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t rest = lines - first - line - (line_major ? 0 : i * kLineStep);
      left[i] = rest <= 0 ? 0 : !line_major || rest > kVector ? kVector : int(rest);
    }
    from = static_cast<const T*>(matrix) + (first + line) * line_stride + k * k_stride;
  }

  // Line i begins at element line_at(i) of `memory`, and K is dense; a negative number: no line.
  template <class LineAt>
  __device__ MmaOperand(const void* memory, const LineAt& line_at, bool vector_)
      : line_stride(0), k_stride(1), step(0), vector(vector_), line_major(false) {
    static_assert(kGather, "lines at equal distances are given by their stride");
    const int line = int(threadIdx.x) / (kBlockK / kVector);
    k = int(threadIdx.x) % (kBlockK / kVector) * kVector;
    offset = line * kPitchK + k * kSize;
    shared_step = kLineStep * kPitchK;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = line_at(line + i * kLineStep);
      left[i] = at < 0 ? 0 : kVector;
      begin[i] = at < 0 ? 0 : at;
    }
    from = static_cast<const T*>(memory) + k;
  }

  // The next stage; `k_left` elements of K are left from its beginning on.
  __device__ void fetch(uint32_t stage, int64_t k_left) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      int inside = left[i];
      if (k_left < kBlockK) {
        const int rest = int(k_left) - k - (line_major ? i * kStepK : 0);
        if (line_major) {
          inside = rest > 0 ? inside : 0;
        } else {
          inside = rest <= 0 ? 0 : rest < inside ? rest : inside;
        }
      }
      const uint32_t to = stage + uint32_t(offset + i * shared_step);
      const T* at = from + (kGather ? begin[kGather ? i : 0] : i * step);
      copy(to, at, inside, vector, line_major ? line_stride : k_stride);
    }
    from += kBlockK * k_stride;
  }

  // Copies a vector: `inside` elements, `next` apart in memory, and zeros for the rest.
  __device__ static void copy(uint32_t to, const T* at, int inside, bool vector, int64_t next) {
    if (vector) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(at),
                   "r"(inside * kSize)
                   : "memory");
      return;
    }
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if (e >= inside) continue;
      if constexpr (kSize == 2) {
        words[e / 2] |= uint32_t(at[e * next].bits) << (e % 2 * 16);
      } else {
        words[e] = __float_as_uint(at[e * next]);
      }
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
  }
};

// --- shared to registers ------------------------------------------------------

// 16 lines by 32 bytes of K as four 8 x 16-byte quarters, in the order
//   words[0]: lines 0-7, first 16 bytes    words[2]: lines 0-7, last 16 bytes
//   words[1]: lines 8-15, first            words[3]: lines 8-15, last
// with row lane / 4 and the 4 bytes lane % 4 of each in this thread: the layout that mma.sync
// takes for 16 rows of a, and (words 0, 2; words 1, 3) for two times 8 columns of b.
template <class T, int kTile>
__device__ void load_fragment(uint32_t stage, bool line_major, int line, int step,
                              uint32_t (&words)[4]) {
  using Operand = MmaOperand<T, kTile>;
  const int lane = int(threadIdx.x) % 32;
  if (!line_major) {
    const uint32_t at =
        stage + uint32_t((line + lane % 16) * Operand::kPitchK + step * 32 + lane / 16 * 16);
    load_matrices(at, words);
  } else if constexpr (sizeof(T) == 2) {
    // 8 x 8 blocks with k along the rows: transposed on the way.
    const int k = step * 16 + lane % 8 + lane / 16 * 8, l = line + lane / 8 % 2 * 8;
    const uint32_t at = stage + uint32_t(k * Operand::kPitchLines + l * 2);
    load_transposed(at, words);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = step * 8 + lane % 4 + i / 2 * 4, l = line + lane / 4 + i % 2 * 8;
      const uint32_t at = stage + uint32_t(k * Operand::kPitchLines + l * 4);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[i]) : "r"(at) : "memory");
    }
  }
}

// --- a tile ---------------------------------------------------------------------

// The part of a tile that a thread has.
template <int kTile>
struct MmaWarp {
  static constexpr int kM = kTile / 2, kN = kTile / 4;
  static constexpr int kRows = kM / 16, kCols = kN / 8;  // mma blocks of a warp

  int lane = int(threadIdx.x) % 32;
  int m = int(threadIdx.x) / 32 / 4 * kM, n = int(threadIdx.x) / 32 % 4 * kN;

  // Where sums[i][j][2 * half] is; its neighbor in the row is sums[i][j][2 * half + 1].
  __device__ int row(int i, int half) const { return m + 16 * i + lane / 4 + 8 * half; }
  __device__ int col(int j) const { return n + 8 * j + lane % 4 * 2; }
};

// Adds a tile of a @ b, over all of K, to the sums. `a` and `b` may be of any type whose
// fetch(stage, k_left) starts the copies of the next stage.
template <class T, MmaMode kMode, int kTile, class A, class B>
__device__ __forceinline__ void mma_sums(
    A& a, B& b, bool line_major_a, bool line_major_b, int64_t k, uint32_t ring,
    float (&sums)[MmaWarp<kTile>::kRows][MmaWarp<kTile>::kCols][4]) {
#if __CUDA_ARCH__ >= 800
  using Operand = MmaOperand<T, kTile>;
  constexpr int kRows = MmaWarp<kTile>::kRows, kCols = MmaWarp<kTile>::kCols;
  const MmaWarp<kTile> warp;
  const int64_t k_tiles = (k + Operand::kBlockK - 1) / Operand::kBlockK;
  const auto stage_of = [&](int64_t k_tile) {
    return ring + uint32_t(k_tile) % kMmaStages * 2 * Operand::kBytes;
  };
  const auto fetch = [&](int64_t k_tile) {
    const int64_t k_left = k - k_tile * Operand::kBlockK;
    if (k_left > 0) {
      a.fetch(stage_of(k_tile), k_left);
      b.fetch(stage_of(k_tile) + Operand::kBytes, k_left);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  __syncthreads();  // the last tile's stages have been read
  for (int s = 0; s < kMmaStages - 1; ++s) fetch(s);
  for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kMmaStages - 2) : "memory");
    __syncthreads();
    // Goes to the place of the last k_tile, which every warp has read by now.
    fetch(k_tile + kMmaStages - 1);
    const uint32_t stage_a = stage_of(k_tile), stage_b = stage_a + Operand::kBytes;
    // Tensor cores cut off where they add; sums of three products are kept short
    // and added by ordinary instructions, which round.
    float parts[kMode == MmaMode::kTF32x3 ? kRows : 1][kCols][4] = {};
#pragma unroll
    for (int step = 0; step < kMmaBytesK / 32; ++step) {
      uint32_t b_words[kCols / 2][4];
#pragma unroll
      for (int j = 0; j < kCols / 2; ++j) {
        load_fragment<T, kTile>(stage_b, line_major_b, warp.n + 16 * j, step, b_words[j]);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t a_words[4];
        load_fragment<T, kTile>(stage_a, line_major_a, warp.m + 16 * i, step, a_words);
        if constexpr (kMode == MmaMode::kTF32x3) {
          uint32_t a_high[4], a_low[4], a_finite[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            split_tf32(a_words[w], a_high[w], a_low[w]);
            a_finite[w] = finite(a_high[w]);
          }
#pragma unroll
          for (int j = 0; j < kCols; ++j) {
            uint32_t high[2], low[2];
            split_tf32(b_words[j / 2][j % 2], high[0], low[0]);
            split_tf32(b_words[j / 2][j % 2 + 2], high[1], low[1]);
            mma(parts[i][j], a_low, finite(high[0]), finite(high[1]), T{});
            mma(parts[i][j], a_finite, low[0], low[1], T{});
            mma(parts[i][j], a_high, high[0], high[1], T{});
          }
        } else {
          if constexpr (kMode == MmaMode::kTF32) {
#pragma unroll
            for (int w = 0; w < 4; ++w) a_words[w] = to_tf32(a_words[w]);
          }
#pragma unroll
          for (int j = 0; j < kCols; ++j) {
            uint32_t b0 = b_words[j / 2][j % 2], b1 = b_words[j / 2][j % 2 + 2];
            if constexpr (kMode == MmaMode::kTF32) b0 = to_tf32(b0), b1 = to_tf32(b1);
            mma(sums[i][j], a_words, b0, b1, T{});
          }
        }
      }
    }
    if constexpr (kMode == MmaMode::kTF32x3) {
#pragma unroll
      for (int i = 0; i < kRows * kCols * 4; ++i) (&sums[0][0][0])[i] += (&parts[0][0][0])[i];
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

// --- kernel -------------------------------------------------------------------

template <class T, MmaMode kMode, int kTile, class Epilogue>
__global__ void __launch_bounds__(kMmaThreads, kMode == MmaMode::kTF32x3 ? 1 : 2)
    gemm_mma_kernel(const __grid_constant__ Matmul p, const __grid_constant__ MmaArgs args,
                    const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  if (kMode == MmaMode::kTF32x3 && kPlannedForHopper) return;
  using Operand = MmaOperand<T, kTile>;
  using Warp = MmaWarp<kTile>;
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const Warp warp;

  for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
    const TileOrigin origin = tile_origin<kTile, kTile>(args, tile);
    const auto offsets = p.batch.offsets_at(origin.batch);
    const auto matrix = [&](int i) {
      return static_cast<const T*>(p.batch.operands[i].data) + offsets[i];
    };
    Operand a(matrix(1), origin.m, p.m, p.a.row, p.a.col, args.vector_a, args.line_major_a);
    Operand b(matrix(2), origin.n, p.n, p.b.col, p.b.row, args.vector_b, args.line_major_b);

    float sums[Warp::kRows][Warp::kCols][4] = {};
    mma_sums<T, kMode, kTile>(a, b, args.line_major_a, args.line_major_b, p.k, ring, sums);

#pragma unroll
    for (int i = 0; i < Warp::kRows; ++i) {
#pragma unroll
      for (int j = 0; j < Warp::kCols; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t m = origin.m + warp.row(i, half), n = origin.n + warp.col(j);
          const bool row = m < p.m;
          const Place at{offsets[0] + m * p.out.row + n, m, n, row && n < p.n, row && n + 1 < p.n};
          float pair[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
          finish_pair<T>(epilogue, pair, at, p.batch.operands[0].data, args.second);
        }
      }
    }
  }
#endif
}

// --- launch -------------------------------------------------------------------

template <class Kernel, class Epilogue>
cudaError_t mma_launch_kernel(Kernel kernel, int shared_bytes, const Matmul& p, const MmaArgs& args,
                              const Epilogue& epilogue, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  // One dim for everything: y and z end at 65535. Blocks step over the rest.
  const int64_t grid = args.tiles < INT32_MAX ? args.tiles : INT32_MAX;
  kernel<<<unsigned(grid), kMmaThreads, unsigned(shared_bytes), stream>>>(p, args, epilogue);
  return cudaGetLastError();
}

inline MmaArgs mma_args(const Matmul& p, void* second, int rows, int columns) {
  MmaArgs args{};
  args.tiles_m = (p.m + rows - 1) / rows;
  args.tiles_n = (p.n + columns - 1) / columns;
  args.tiles = args.tiles_m * args.tiles_n * p.batch.numel;
  args.second = second;
  args.line_major_a = p.a.row < p.a.col;
  args.line_major_b = p.b.col < p.b.row;
  args.vector_a = whole_vectors(p, 1, p.a);
  args.vector_b = whole_vectors(p, 2, p.b);
  return args;
}

template <class T, MmaMode kMode, class Epilogue>
cudaError_t gemm_mma(const Matmul& p, const Epilogue& epilogue, void* second, int tile,
                     cudaStream_t stream) {
  const MmaArgs args = mma_args(p, second, tile, tile);
  const auto run = [&](auto kernel, int operand_bytes) {
    return mma_launch_kernel(kernel, kMmaStages * 2 * operand_bytes, p, args, epilogue, stream);
  };
  return tile == 128 ? run(gemm_mma_kernel<T, kMode, 128, Epilogue>, MmaOperand<T, 128>::kBytes)
                     : run(gemm_mma_kernel<T, kMode, 64, Epilogue>, MmaOperand<T, 64>::kBytes);
}

}  // namespace cuda_ops
