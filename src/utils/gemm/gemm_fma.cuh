// The matrix product of float32 on ordinary multiply-adds, from sm_80 on: as exact as
// float32 is, at half to three quarters of the rate of the multiply-adds.
//
//   block    256 threads, one of six tiles of out (kFmaTiles of gemm_fma.h), 3 or 4 stages
//   slice    8, 4, 2 or 1 of its warps: a tile for them, and an equal part of each stage's k's.
//            The smaller the tile, the more slices, whose sums the block adds in their order
//   warp     4 x 8 threads
//   thread   16 rows by 8 columns, 128 multiply-adds for 24 floats of shared memory, or 8 by 8,
//            or 8 by 4
//
// A stage holds both operands k by k, their lines and 4 of padding, whichever way they lie in
// memory. Where lines are neighbors there and aligned, copies are 16 bytes, else 4 (8 k's of 4
// lines a warp, which are 32 different banks), so that any strides and any alignment take the
// same way. Which of the two is known at compile time: without a branch the compiler puts the
// copies between the multiplications of a stage.
#pragma once

#include "gemm/gemm_fma.h"
#include "gemm/gemm_mma.cuh"

namespace cuda_ops {

// A thread's quads of rows, 16 apart, and of columns, 32 apart.
template <int kQuadsM, int kQuadsN, int kSlices_>
struct FmaTile {
  static constexpr int kSlices = kSlices_;
  static constexpr int kThreads = kMmaThreads / kSlices, kWarps = kThreads / 32;  // of a slice
  static constexpr int kWarpsN = kWarps == 8 ? 2 : 1, kWarpsM = kWarps / kWarpsN;
  static constexpr int kRows = kWarpsM * 16 * kQuadsM, kColumns = kWarpsN * 32 * kQuadsN;
  static constexpr int kPitchRows = kRows + 4, kPitchColumns = kColumns + 4;
  static constexpr int kQuads = 4 * kQuadsM * kQuadsN;  // of sums
  // The code of more k's for each thread would not fit the instruction cache.
  static constexpr int kBlockK = kSlices == 1 ? 8 : kSlices == 8 ? 32 : 16;
  static constexpr int kSliceK = kBlockK / kSlices, kStages = kSlices == 1 ? 4 : 3;
  // Sums of this many products are added to totals, which wait in shared memory: the error grows
  // with K / 256 and with 256 instead of with K. Small products have a smaller interval, as in
  // cuBLAS, which cuts those into more parts.
  static constexpr int kFlush = kSlices == 1 ? 256 : kSlices == 8 ? 64 : 128;

  float rows[kStages][kBlockK][kPitchRows];
  float columns[kStages][kBlockK][kPitchColumns];
  float4 totals[kQuads][kMmaThreads];
};

// One operand of one tile on its way: kLines lines of a stage.
template <int kLines, int kBlockK, bool kQuads>
struct FmaOperand {
  static constexpr int kPitch = kLines + 4;
  // Threads of one k, and k's of the block, that copy at a time.
  static constexpr int kQuadThreads = kLines < 128 ? kLines / 4 : 32;
  static constexpr int kCopiedK = kQuads ? kMmaThreads / kQuadThreads : 8;
  static constexpr int kCopiedLines = kQuads ? 4 * kQuadThreads : 32;
  static constexpr int kCopies = kLines / kCopiedLines;  // of a thread, of one k
  static constexpr int kSteps = kBlockK / kCopiedK;
  static_assert(kBlockK % kCopiedK == 0, "all threads copy, in every step");

  const float* from;
  int64_t line_step, k_step;  // elements from a copy to the next
  int64_t stage_step;
  int offset, k;  // floats into the stage
  int left;       // lines from the thread's first on that are inside

  __device__ FmaOperand(const float* matrix, int64_t first, int64_t lines, int64_t line_stride,
                        int64_t k_stride, bool line_major) {
    const int thread = int(threadIdx.x);
    k = kQuads ? thread / kQuadThreads : line_major ? thread / 32 : thread % 8;
    const int line = kQuads ? thread % kQuadThreads * 4 : line_major ? thread % 32 : thread / 8;
    offset = k * kPitch + line;
    left = int(lines - first < kLines ? lines - first : kLines) - line;
    from = matrix + (first + line) * line_stride + k * k_stride;
    line_step = kCopiedLines * line_stride;
    k_step = kCopiedK * k_stride;
    stage_step = kBlockK * k_stride;
    // Keeps the strides: the compiler would read them again for each stage, and wait for them.
    asm volatile("" : "+l"(line_step), "+l"(k_step), "+l"(stage_step));
  }

  // The next stage; `k_left` elements of K are left from its beginning on, or none.
  __device__ void fetch(uint32_t stage, int k_left) {
    const uint32_t to = stage + 4 * uint32_t(offset);
    const float* of_k = from;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at_k = step * kCopiedK;
      const int inside = k + at_k < k_left ? left : 0;
      const float* at = of_k;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int here = inside - i * kCopiedLines;
        const uint32_t there = to + 4 * (at_k * kPitch + i * kCopiedLines);
        if constexpr (kQuads) {
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(there), "l"(at),
                       "r"(here <= 0  ? 0
                           : here < 4 ? 4 * here
                                      : 16)
                       : "memory");
        } else {
          asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(there), "l"(at),
                       "r"(here > 0 ? 4 : 0)
                       : "memory");
        }
        at += line_step;
      }
      of_k += k_step;
    }
    from += stage_step;
  }
};

template <class Tile, bool kQuadsA, bool kQuadsB, class Epilogue>
__global__ void __launch_bounds__(kMmaThreads, 1)
    gemm_fma_kernel(const __grid_constant__ Matmul p, const __grid_constant__ MmaArgs args,
                    const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  constexpr int kBlockK = Tile::kBlockK, kStages = Tile::kStages, kSliceK = Tile::kSliceK;
  constexpr int kM = Tile::kRows / Tile::kWarpsM / 4, kN = Tile::kColumns / Tile::kWarpsN / 8;
  constexpr int kQuadsN = kN / 4;
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<Tile*>(memory);
  const auto shared_rows = uint32_t(__cvta_generic_to_shared(shared.rows));
  const auto shared_columns = uint32_t(__cvta_generic_to_shared(shared.columns));
  const int thread = int(threadIdx.x), lane = thread % 32;
  const int slice = thread / Tile::kThreads, warp = thread % Tile::kThreads / 32;
  // One of two neighboring lanes is below the other, so that half a warp reads 8 different
  // quads of columns, 128 bytes, in one go: 2 for a load of 16 bytes a lane, not 4.
  const int lane_row = lane % 2 + lane / 16 * 2, lane_column = lane / 2 % 8;
  const int row = warp / Tile::kWarpsN * 4 * kM + lane_row * 4;  // of the thread's first quad
  const int column = warp % Tile::kWarpsN * 8 * kN + lane_column * 4;
  const auto below = [](int i) { return i / 4 * 16 + i % 4; };
  const auto beside = [](int j) { return j / 4 * 32 + j % 4; };
  const int64_t k_tiles = (p.k + kBlockK - 1) / kBlockK;

  for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
    const TileOrigin origin = tile_origin<Tile::kRows, Tile::kColumns>(args, tile);
    const auto offsets = p.batch.offsets_at(origin.batch);
    const auto matrix = [&](int i) {
      return static_cast<const float*>(p.batch.operands[i].data) + offsets[i];
    };
    FmaOperand<Tile::kRows, kBlockK, kQuadsA> a(matrix(1), origin.m, p.m, p.a.row, p.a.col,
                                                args.line_major_a);
    FmaOperand<Tile::kColumns, kBlockK, kQuadsB> b(matrix(2), origin.n, p.n, p.b.col, p.b.row,
                                                   args.line_major_b);
    const auto after = [](uint32_t stage) { return stage == kStages - 1 ? 0 : stage + 1; };
    int64_t k_left = p.k;  // from the next stage to fetch on
    uint32_t fetched = 0;
    const auto fetch = [&] {
      const int left = int(k_left < kBlockK ? k_left : kBlockK);
      a.fetch(shared_rows + fetched * uint32_t(sizeof(shared.rows[0])), left);
      b.fetch(shared_columns + fetched * uint32_t(sizeof(shared.columns[0])), left);
      asm volatile("cp.async.commit_group;" ::: "memory");
      k_left -= kBlockK;
      fetched = after(fetched);
    };

    float sums[kM][kN] = {};
    bool flushed = false;
    const auto with_totals = [&](auto act) {
#pragma unroll
      for (int i = 0; i < Tile::kQuads; ++i) {
        float* four = &sums[i / kQuadsN][i % kQuadsN * 4];
        act(four, shared.totals[i][thread]);
      }
    };
    const auto add_totals = [&] {
      if (!flushed) return;
      with_totals([](float* four, const float4& totals) {
        four[0] += totals.x;
        four[1] += totals.y;
        four[2] += totals.z;
        four[3] += totals.w;
      });
    };
    const auto put_totals = [](const float* four, float4& totals) {
      totals = {four[0], four[1], four[2], four[3]};
    };

    // The operands of a thread at one k, and at the next: loaded while it multiplies the other.
    static_assert(kSliceK % 2 == 0, "a stage begins with the first of the two");
    float rows[2][kM], columns[2][kN];
    const auto load = [&](int to, uint32_t stage, int k) {
      k += slice * kSliceK;
#pragma unroll
      for (int i = 0; i < kM; i += 4) {
        const auto r = *reinterpret_cast<const float4*>(&shared.rows[stage][k][row + below(i)]);
        float* quad = &rows[to][i];
        quad[0] = r.x, quad[1] = r.y, quad[2] = r.z, quad[3] = r.w;
      }
#pragma unroll
      for (int j = 0; j < kN; j += 4) {
        const auto c =
            *reinterpret_cast<const float4*>(&shared.columns[stage][k][column + beside(j)]);
        float* quad = &columns[to][j];
        quad[0] = c.x, quad[1] = c.y, quad[2] = c.z, quad[3] = c.w;
      }
    };

    __syncthreads();  // the last tile's stages and totals have been read
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) fetch();
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    load(0, 0, 0);
    uint32_t stage = 0;
    int until_flush = Tile::kFlush / kSliceK;  // stages
#pragma unroll 1
    for (int64_t stages_left = k_tiles; stages_left > 0; --stages_left) {
#pragma unroll
      for (int k = 0; k < kSliceK; ++k) {
        if (k < kSliceK - 1) {
          load((k + 1) % 2, stage, k + 1);
        } else {
          // The next stage is there, and every warp has loaded its operands of this one. The bytes
          // behind the last stage are never multiplied.
          asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
          __syncthreads();
          stage = after(stage);
          load((k + 1) % 2, stage, 0);
        }
        // Fills the stage that was read before this one, and not right behind a barrier, so that
        // some warps copy while others multiply.
        if (k == (kSliceK > 2 ? 1 : 0)) fetch();
#pragma unroll
        for (int i = 0; i < kM; ++i) {
#pragma unroll
          for (int j = 0; j < kN; ++j) {
            sums[i][j] = fmaf(rows[k % 2][i], columns[k % 2][j], sums[i][j]);
          }
        }
      }
      if (--until_flush == 0 && stages_left > 1) {
        add_totals();
        with_totals([&](float* four, float4& totals) {
          put_totals(four, totals);
          four[0] = four[1] = four[2] = four[3] = 0;
        });
        flushed = true;
        until_flush = Tile::kFlush / kSliceK;
      }
    }
    add_totals();
    asm volatile("cp.async.wait_group 0;" ::: "memory");

    const auto finish = [&](int i, const float* four) {
      const int64_t m = origin.m + row + below(i / kQuadsN);
      const bool inside = m < p.m;
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int64_t n = origin.n + column + beside(i % kQuadsN * 4 + j);
        const Place at{offsets[0] + m * p.out.row + n, m, n, inside && n < p.n,
                       inside && n + 1 < p.n};
        float pair[2] = {four[j], four[j + 1]};
        finish_pair<float>(epilogue, pair, at, p.batch.operands[0].data, args.second);
      }
    };
    if constexpr (Tile::kSlices == 1) {
#pragma unroll
      for (int i = 0; i < Tile::kQuads; ++i) finish(i, &sums[i / kQuadsN][i % kQuadsN * 4]);
    } else {
      // The threads at the same place of each slice share the quads that they all have.
      with_totals(put_totals);
      __syncthreads();
      constexpr int kShare = Tile::kQuads / Tile::kSlices;
#pragma unroll 1
      for (int i = slice * kShare; i < (slice + 1) * kShare; ++i) {
        float four[4] = {};
#pragma unroll
        for (int s = 0; s < Tile::kSlices; ++s) {
          const float4 part = shared.totals[i][s * Tile::kThreads + thread % Tile::kThreads];
          four[0] += part.x, four[1] += part.y, four[2] += part.z, four[3] += part.w;
        }
        finish(i, four);
      }
    }
  }
#endif
}

template <class Tile, bool kQuadsA, bool kQuadsB, class Epilogue>
cudaError_t fma_launch(const Matmul& p, const Epilogue& epilogue, void* second,
                       cudaStream_t stream) {
  static_assert(Tile::kBlockK == fma_block_k(Tile::kRows, Tile::kColumns));
  static_assert(sizeof(Tile) <= (fma_fits_anywhere(Tile::kRows, Tile::kColumns) ? 99 : 227) * 1024);
  return mma_launch_kernel(gemm_fma_kernel<Tile, kQuadsA, kQuadsB, Epilogue>, int(sizeof(Tile)), p,
                           mma_args(p, second, Tile::kRows, Tile::kColumns), epilogue, stream);
}

// A layer has fewer tiles and copies: each is a kernel for each of its epilogues.
template <bool kLinear, class Epilogue>
cudaError_t gemm_fma(const Matmul& p, const FmaConfig& config, const Epilogue& epilogue,
                     void* second, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto consider = [&](auto tile) {
    using Tile = decltype(tile);
    if (config.rows != Tile::kRows || config.columns != Tile::kColumns) return;
    const bool a = config.quads_a, b = config.quads_b;
    if constexpr (!kLinear) {
      if (a && b) error = fma_launch<Tile, true, true>(p, epilogue, second, stream);
      if (a && !b) error = fma_launch<Tile, true, false>(p, epilogue, second, stream);
      if (!a && b) error = fma_launch<Tile, false, true>(p, epilogue, second, stream);
    }
    if (!a && !b) error = fma_launch<Tile, false, false>(p, epilogue, second, stream);
  };
  consider(FmaTile<2, 2, 1>{});
  consider(FmaTile<2, 2, 4>{});
  if constexpr (!kLinear) {
    consider(FmaTile<4, 2, 1>{});
    consider(FmaTile<2, 2, 2>{});
    consider(FmaTile<2, 2, 8>{});
    consider(FmaTile<2, 1, 8>{});
  }
  return error;
}

}  // namespace cuda_ops
