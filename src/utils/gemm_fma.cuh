// The matrix product of float32 on ordinary multiply-adds, from sm_80 on: as exact as
// float32 is, at most of the rate that the multiply-adds have.
//
//   block    256 threads as 16 x 16, a tile of 128 x 128, stages as in gemm_mma.cuh
//   thread   8 rows by 8 columns: 64 multiply-adds for 16 floats of shared memory
//
// A thread reads 16 bytes at a time, whichever way the operand lies in memory:
//
//   K-major     4 k's of each of its 8 lines, which are 16 lines apart: 8 neighbours
//               read 8 lines, 80 bytes apart, which are 8 different groups of banks
//   line-major  4 neighbouring lines of one k, twice, 64 lines apart
#pragma once

#include "gemm_mma.cuh"

namespace cuda_ops {

constexpr int kFmaTile = 128, kFmaSquare = 8;

// Line i of the 8 that thread `index` of 16 has.
template <bool kLineMajor>
__device__ int fma_line(int index, int i) {
  return kLineMajor ? index * 4 + i % 4 + i / 4 * 64 : index + i * 16;
}

// Four k's of a thread's lines: values[k][i].
template <bool kLineMajor>
__device__ void fma_load(uint32_t stage, int index, int k, float (&values)[4][kFmaSquare]) {
  using Operand = MmaOperand<float, kFmaTile>;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t at =
        kLineMajor ? stage + uint32_t((k + i / 2) * Operand::kPitchLines +
                                      fma_line<true>(index, i % 2 * 4) * 4)
                   : stage + uint32_t(fma_line<false>(index, i) * Operand::kPitchK + k * 4);
    float four[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                 : "r"(at));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kLineMajor) {
        values[i / 2][i % 2 * 4 + e] = four[e];
      } else {
        values[e][i] = four[e];
      }
    }
  }
}

template <bool kLineMajorA, bool kLineMajorB, class Epilogue>
__global__ void __launch_bounds__(kMmaThreads, 1)
    gemm_fma_kernel(const __grid_constant__ Matmul p, const __grid_constant__ MmaArgs args,
                    const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  using Operand = MmaOperand<float, kFmaTile>;
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const int thread_m = int(threadIdx.x) / 16, thread_n = int(threadIdx.x) % 16;
  const int64_t k_tiles = (p.k + Operand::kBlockK - 1) / Operand::kBlockK;

  for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
    const TileOrigin origin = tile_origin<kFmaTile>(args, tile);
    const auto offsets = p.batch.offsets_at(origin.batch);
    const auto matrix = [&](int i) {
      return static_cast<const float*>(p.batch.operands[i].data) + offsets[i];
    };
    Operand a(matrix(1), origin.m, p.m, p.a.row, p.a.col, args.vector_a, kLineMajorA);
    Operand b(matrix(2), origin.n, p.n, p.b.col, p.b.row, args.vector_b, kLineMajorB);

    // Sums of 256 products are added to totals: an error that grew with K grows with
    // K / 256 and 256 apart.
    constexpr int kFlush = 256 / Operand::kBlockK;
    float sums[kFmaSquare][kFmaSquare] = {}, totals[kFmaSquare][kFmaSquare] = {};
    const auto flush = [&] {
#pragma unroll
      for (int i = 0; i < kFmaSquare * kFmaSquare; ++i) {
        totals[i / kFmaSquare][i % kFmaSquare] += sums[i / kFmaSquare][i % kFmaSquare];
        sums[i / kFmaSquare][i % kFmaSquare] = 0;
      }
    };
    const auto stage_of = [&](int64_t k_tile) {
      return ring + uint32_t(k_tile) % kMmaStages * 2 * Operand::kBytes;
    };
    const auto fetch = [&](int64_t k_tile) {
      const int64_t k_left = p.k - k_tile * Operand::kBlockK;
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
      fetch(k_tile + kMmaStages - 1);
      const uint32_t stage_a = stage_of(k_tile), stage_b = stage_a + Operand::kBytes;
#pragma unroll
      for (int k = 0; k < Operand::kBlockK; k += 4) {
        float row[4][kFmaSquare], col[4][kFmaSquare];
        fma_load<kLineMajorA>(stage_a, thread_m, k, row);
        fma_load<kLineMajorB>(stage_b, thread_n, k, col);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int i = 0; i < kFmaSquare; ++i) {
#pragma unroll
            for (int j = 0; j < kFmaSquare; ++j) {
              sums[i][j] = fmaf(row[e][i], col[e][j], sums[i][j]);
            }
          }
        }
      }
      if (k_tile % kFlush == kFlush - 1) flush();
    }
    flush();
    asm volatile("cp.async.wait_group 0;" ::: "memory");

#pragma unroll
    for (int i = 0; i < kFmaSquare; ++i) {
      const int64_t m = origin.m + fma_line<kLineMajorA>(thread_m, i);
#pragma unroll
      for (int j = 0; j < kFmaSquare; ++j) {
        const int64_t n = origin.n + fma_line<kLineMajorB>(thread_n, j);
        const Place at{offsets[0] + m * p.out.row + n, m, n, m < p.m && n < p.n, false};
        float one[2] = {totals[i][j], 0};
        finish_pair<float>(epilogue, one, at, p.batch.operands[0].data, args.second);
      }
    }
  }
#endif
}

template <class Epilogue>
cudaError_t gemm_fma(const Matmul& p, const Epilogue& epilogue, void* second, cudaStream_t stream) {
  const MmaArgs args = mma_args(p, second, kFmaTile, 4);
  auto kernel = gemm_fma_kernel<false, false, Epilogue>;
  if (args.line_major_a) {
    kernel = args.line_major_b ? gemm_fma_kernel<true, true, Epilogue>
                               : gemm_fma_kernel<true, false, Epilogue>;
  } else if (args.line_major_b) {
    kernel = gemm_fma_kernel<false, true, Epilogue>;
  }
  return mma_launch_kernel(kernel, kMmaStages * 2 * MmaOperand<float, kFmaTile>::kBytes, p, args,
                           epilogue, stream);
}

}  // namespace cuda_ops
