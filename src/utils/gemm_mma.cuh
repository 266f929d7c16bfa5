// The matrix product on the tensor cores of every GPU from sm_80 on: cp.async
// copies, mma.sync multiplies. Also what Hopper runs for matrices that its copy
// engine cannot read (rows that do not start at multiples of 16 bytes, steps in
// both dims) and for tf32 of anything but two K-major operands.
//
//   block   256 threads, a tile of kTile x kTile of out, 3 stages of 64 bytes of K
//   warp    1/2 of the rows by 1/4 of the columns
//
// A stage holds each operand the way it lies in memory, so that its copies are
// whole 16-byte vectors, padded so that no bank is hit twice:
//
//   K-major     kTile lines of  64 bytes of K, 16 of padding
//   line-major  64 / size k's of kTile lines, 16 bytes of padding (32 for floats)
#pragma once

#include "gemm_epilogue.cuh"
#include "matmul.h"

namespace cuda_ops {

// How floats are multiplied. kTF32x3 splits each into two tf32, high + low, and
// adds three products: the lost one, low * low, is below the rounding of a float.
enum class MmaMode { kHalves, kTF32, kTF32x3 };

constexpr int kMmaThreads = 256, kMmaStages = 3, kMmaBytesK = 64;

struct MmaArgs {
  int64_t tiles_m, tiles_n, tiles;
  void* second;
  // 16-byte copies are possible; which way the operand lies.
  bool vector_a, vector_b, line_major_a, line_major_b;
};

// --- global to shared ---------------------------------------------------------

// One operand of one tile on its way: straight to shared memory by cp.async where
// vectors are aligned, else element by element through registers.
template <class T, int kTile>
struct MmaOperand {
  static constexpr int kSize = int(sizeof(T)), kVector = 16 / kSize, kBlockK = kMmaBytesK / kSize;
  static constexpr int kVectors = kTile * kBlockK / kVector / kMmaThreads;
  static constexpr int kPitchK = kMmaBytesK + 16;
  static constexpr int kPitchLines = kTile * kSize + (kSize == 4 ? 32 : 16);
  static constexpr int kBytes =
      kTile * kPitchK > kBlockK * kPitchLines ? kTile * kPitchK : kBlockK * kPitchLines;
  static_assert(kVectors >= 1, "more threads than vectors");

  const T* data;
  int64_t line_stride, k_stride, lines_left;
  bool vector, line_major;
  T values[kVectors][kVector];

  __device__ MmaOperand(const void* matrix, int64_t first, int64_t lines, int64_t line_stride_,
                        int64_t k_stride_, bool vector_, bool line_major_)
      : data(static_cast<const T*>(matrix) + first * line_stride_),
        line_stride(line_stride_),
        k_stride(k_stride_),
        lines_left(lines - first),
        vector(vector_),
        line_major(line_major_) {}

  // The vector `i` of this thread: its first line and k, where it goes.
  __device__ void locate(int i, int& line, int& k, int& offset) const {
    const int index = i * kMmaThreads + int(threadIdx.x);
    if (line_major) {
      line = index % (kTile / kVector) * kVector;
      k = index / (kTile / kVector);
      offset = k * kPitchLines + line * kSize;
    } else {
      line = index / (kBlockK / kVector);
      k = index % (kBlockK / kVector) * kVector;
      offset = line * kPitchK + k * kSize;
    }
  }

  __device__ void fetch(uint32_t stage, int64_t k_begin, int64_t ks) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      int line, k, offset;
      locate(i, line, k, offset);
      const int64_t k_left = ks - k_begin - k;
      const T* from = data + line * line_stride + (k_begin + k) * k_stride;
      if (vector) {
        int64_t left = line_major ? lines_left - line : k_left;
        if ((line_major ? k_left : lines_left - line) <= 0) left = 0;
        const int bytes = left >= kVector ? 16 : left > 0 ? int(left) * kSize : 0;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(stage + offset),
                     "l"(bytes > 0 ? from : data), "r"(bytes)
                     : "memory");
      } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const bool inside = line_major ? line + e < lines_left && k_left > 0
                                         : line < lines_left && e < k_left;
          values[i][e] = inside ? from[e * (line_major ? line_stride : k_stride)] : T{};
        }
      }
    }
  }

  __device__ void store(uint32_t stage) const {
    if (vector) return;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      int line, k, offset;
      locate(i, line, k, offset);
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (kSize == 2) {
          words[w] = values[i][2 * w].bits | uint32_t(values[i][2 * w + 1].bits) << 16;
        } else {
          words[w] = __float_as_uint(values[i][w]);
        }
      }
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(stage + offset), "r"(words[0]),
                   "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    }
  }
};

// --- shared to registers ------------------------------------------------------

// 16 lines by 32 bytes of K as four 8 x 16-byte quarters, in the order
//   words[0]: lines 0-7, first 16 bytes    words[2]: lines 0-7, last 16 bytes
//   words[1]: lines 8-15, first            words[3]: lines 8-15, last
// with row lane / 4 and the 4 bytes lane % 4 of each in this thread: what mma.sync
// wants of 16 rows of a, and (words 0, 2; words 1, 3) of two times 8 columns of b.
template <class T, int kTile>
__device__ void load_fragment(uint32_t stage, bool line_major, int line, int step,
                              uint32_t (&words)[4]) {
  using Operand = MmaOperand<T, kTile>;
  const int lane = int(threadIdx.x) % 32;
  if (!line_major) {
    const uint32_t at =
        stage + uint32_t((line + lane % 16) * Operand::kPitchK + step * 32 + lane / 16 * 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
  } else if constexpr (sizeof(T) == 2) {
    // 8 x 8 blocks with k along the rows: transposed on the way.
    const int k = step * 16 + lane % 8 + lane / 16 * 8, l = line + lane / 8 % 2 * 8;
    const uint32_t at = stage + uint32_t(k * Operand::kPitchLines + l * 2);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = step * 8 + lane % 4 + i / 2 * 4, l = line + lane / 4 + i % 2 * 8;
      const uint32_t at = stage + uint32_t(k * Operand::kPitchLines + l * 4);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[i]) : "r"(at) : "memory");
    }
  }
}

// --- the instruction ----------------------------------------------------------

#define CUDA_OPS_MMA(SHAPE, TYPE)                                                                \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, " \
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                   \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           Half) {
  CUDA_OPS_MMA("m16n8k16", "f16");
}
__device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           BFloat16) {
  CUDA_OPS_MMA("m16n8k16", "bf16");
}
__device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           float) {
  CUDA_OPS_MMA("m16n8k8", "tf32");
}
#undef CUDA_OPS_MMA

__device__ inline uint32_t to_tf32(uint32_t word) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
  return rounded;
}

// high + low is the float, but for a rounding of 2^-22 of it.
__device__ inline void split_tf32(uint32_t word, uint32_t& high, uint32_t& low) {
  high = to_tf32(word);
  const float rest = __uint_as_float(word) - __uint_as_float(high);
  low = fabsf(rest) < INFINITY ? to_tf32(__float_as_uint(rest)) : 0;
}

// An infinity or NaN multiplies in high * high alone: times a low of 0 it would make
// NaN of every infinity.
__device__ inline uint32_t finite(uint32_t high) {
  return (high & 0x7f800000u) == 0x7f800000u ? 0 : high;
}

// --- kernel -------------------------------------------------------------------

template <class T, MmaMode kMode, int kTile, class Epilogue>
__global__ void __launch_bounds__(kMmaThreads, kMode == MmaMode::kTF32x3 ? 1 : 2)
    gemm_mma_kernel(const __grid_constant__ Matmul p, const __grid_constant__ MmaArgs args,
                    const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  using Operand = MmaOperand<T, kTile>;
  constexpr int kWarpM = kTile / 2, kWarpN = kTile / 4;
  constexpr int kRows = kWarpM / 16, kCols = kWarpN / 8;  // mma blocks of a warp
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int warp_m = warp / 4 * kWarpM, warp_n = warp % 4 * kWarpN;
  const int64_t k_tiles = (p.k + Operand::kBlockK - 1) / Operand::kBlockK;

  for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
    const int64_t first_m = tile % args.tiles_m * kTile;
    const int64_t first_n = tile / args.tiles_m % args.tiles_n * kTile;
    const auto offsets = p.batch.offsets_at(tile / args.tiles_m / args.tiles_n);
    const auto matrix = [&](int i) {
      return static_cast<const T*>(p.batch.operands[i].data) + offsets[i];
    };
    Operand a(matrix(1), first_m, p.m, p.a.row, p.a.col, args.vector_a, args.line_major_a);
    Operand b(matrix(2), first_n, p.n, p.b.col, p.b.row, args.vector_b, args.line_major_b);

    float sums[kRows][kCols][4] = {};
    const auto stage_of = [&](int64_t k_tile) {
      return ring + uint32_t(k_tile % kMmaStages) * 2 * Operand::kBytes;
    };
    const auto fetch = [&](int64_t k_tile) {
      if (k_tile >= k_tiles) return;
      a.fetch(stage_of(k_tile), k_tile * Operand::kBlockK, p.k);
      b.fetch(stage_of(k_tile) + Operand::kBytes, k_tile * Operand::kBlockK, p.k);
    };
    const auto store = [&](int64_t k_tile) {
      if (k_tile < k_tiles) {
        a.store(stage_of(k_tile));
        b.store(stage_of(k_tile) + Operand::kBytes);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    __syncthreads();  // the last tile's stages have been read
    for (int s = 0; s < kMmaStages - 1; ++s) {
      fetch(s);
      store(s);
    }
    for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kMmaStages - 2) : "memory");
      __syncthreads();
      // Goes where the last k_tile was, which every warp has read by now.
      fetch(k_tile + kMmaStages - 1);
      const uint32_t stage_a = stage_of(k_tile), stage_b = stage_a + Operand::kBytes;
      // Tensor cores cut off where they add; sums of three products are kept short
      // and added by ordinary instructions, which round.
      float parts[kRows][kCols][4] = {};
#pragma unroll
      for (int step = 0; step < kMmaBytesK / 32; ++step) {
        uint32_t b_words[kCols / 2][4];
#pragma unroll
        for (int j = 0; j < kCols / 2; ++j) {
          load_fragment<T, kTile>(stage_b, args.line_major_b, warp_n + 16 * j, step, b_words[j]);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          uint32_t a_words[4];
          load_fragment<T, kTile>(stage_a, args.line_major_a, warp_m + 16 * i, step, a_words);
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
      store(k_tile + kMmaStages - 1);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t m = first_m + warp_m + 16 * i + lane / 4 + 8 * half;
          const int64_t n = first_n + warp_n + 8 * j + lane % 4 * 2;
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

template <class T, MmaMode kMode, int kTile, class Epilogue>
cudaError_t mma_launch(const Matmul& p, const MmaArgs& args, const Epilogue& epilogue,
                       cudaStream_t stream) {
  const auto kernel = gemm_mma_kernel<T, kMode, kTile, Epilogue>;
  constexpr int kShared = kMmaStages * 2 * MmaOperand<T, kTile>::kBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  // One dim for everything: y and z end at 65535. Blocks step over the rest.
  const int64_t grid = args.tiles < INT32_MAX ? args.tiles : INT32_MAX;
  kernel<<<unsigned(grid), kMmaThreads, kShared, stream>>>(p, args, epilogue);
  return cudaGetLastError();
}

// Rows of 16-byte vectors, along K or along the lines.
inline bool mma_vectors(const Matmul& p, int operand, int64_t stride, int bytes) {
  if (reinterpret_cast<uintptr_t>(p.batch.operands[operand].data) % 16 != 0) return false;
  for (int d = 0; d < p.batch.dims; ++d) {
    if (p.batch.operands[operand].strides[d] * bytes % 16 != 0) return false;
  }
  return stride * bytes % 16 == 0;
}

template <class T, MmaMode kMode, class Epilogue>
cudaError_t gemm_mma(const Matmul& p, const Epilogue& epilogue, void* second, int tile,
                     cudaStream_t stream) {
  constexpr int kBytes = int(sizeof(T));
  MmaArgs args{};
  args.tiles_m = (p.m + tile - 1) / tile;
  args.tiles_n = (p.n + tile - 1) / tile;
  args.tiles = args.tiles_m * args.tiles_n * p.batch.numel;
  args.second = second;
  args.line_major_a = p.a.row < p.a.col;
  args.line_major_b = p.b.col < p.b.row;
  args.vector_a = args.line_major_a ? p.a.row == 1 && mma_vectors(p, 1, p.a.col, kBytes)
                                    : p.a.col == 1 && mma_vectors(p, 1, p.a.row, kBytes);
  args.vector_b = args.line_major_b ? p.b.col == 1 && mma_vectors(p, 2, p.b.row, kBytes)
                                    : p.b.row == 1 && mma_vectors(p, 2, p.b.col, kBytes);
  return tile == 128 ? mma_launch<T, kMode, 128>(p, args, epilogue, stream)
                     : mma_launch<T, kMode, 64>(p, args, epilogue, stream);
}

}  // namespace cuda_ops
