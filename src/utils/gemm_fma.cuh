// The matrix product of float32 on ordinary multiply-adds, from sm_80 on: as exact as
// float32 is, at most of the rate that the multiply-adds have.
//
//   block    256 threads, a tile of 128 x 128 of out, 4 stages of 8 k's; two on an SM
//   warp     64 rows by 32 columns, as 8 x 4 threads
//   thread   8 rows by 8 columns: 64 multiply-adds for 16 floats of shared memory
//
// A stage holds both operands k by k, 128 lines and 4 of padding, whichever way they lie
// in memory: a copy moves 4 bytes where k's are neighbours (8 k's of 4 lines a warp, which
// are 32 different banks), else 16 where those are aligned. So a thread reads quads of
// lines, and any strides and any alignment take the same way.
#pragma once

#include "gemm_mma.cuh"

namespace cuda_ops {

constexpr int kFmaTile = 128, kFmaBlockK = 8, kFmaStages = 4, kFmaSquare = 8;
constexpr int kFmaPitch = kFmaTile + 4;
// Sums of so many products are added to totals: an error that grew with K grows with
// K / 128 and 128 apart. Totals wait in shared memory, registers are for two blocks.
constexpr int kFmaFlush = 128;

struct FmaShared {
  float stages[kFmaStages][2][kFmaBlockK][kFmaPitch];
  float4 totals[kFmaSquare * kFmaSquare / 4][kMmaThreads];
};

// One operand of one tile on its way: a thread copies 4 floats of a stage, 32 lines
// apart, or neighbouring lines at once.
struct FmaOperand {
  const float* from;
  int64_t step, k_stride;  // elements to the next of the four, and to the next k
  int offset, k, left;     // floats into the stage; lines from the first on that are inside
  bool quads;

  __device__ FmaOperand(const float* matrix, int64_t first, int64_t lines, int64_t line_stride,
                        int64_t k_stride_, bool line_major, bool vector)
      : step(32 * line_stride), k_stride(k_stride_), quads(line_major && vector) {
    const int thread = int(threadIdx.x);
    k = line_major ? thread / 32 : thread % 8;
    const int line = line_major ? thread % 32 * (quads ? 4 : 1) : thread / 8;
    offset = k * kFmaPitch + line;
    const int64_t lines_left = lines - first - line;
    left = lines_left < kFmaTile ? int(lines_left) : kFmaTile;
    from = matrix + (first + line) * line_stride + k * k_stride;
  }

  // The next stage; `k_left` elements of K are left from its beginning on.
  __device__ void fetch(float* stage, int64_t k_left) {
    const auto to = uint32_t(__cvta_generic_to_shared(stage + offset));
    const int inside = k < k_left ? left : 0;
    if (quads) {
      const int bytes = inside <= 0 ? 0 : inside < 4 ? inside * 4 : 16;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                   : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + 128 * i),
                     "l"(from + i * step), "r"(32 * i < inside ? 4 : 0)
                     : "memory");
      }
    }
    from += kFmaBlockK * k_stride;
  }
};

template <class Epilogue>
__global__ void __launch_bounds__(kMmaThreads, 2)
    gemm_fma_kernel(const __grid_constant__ Matmul p, const __grid_constant__ MmaArgs args,
                    const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<FmaShared*>(memory);
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int row = warp / 4 * 64 + lane / 4 * 4;                 // of the thread's first quad;
  const int column = warp % 4 * 32 + lane % 4 * 4;              // the other one is 32 rows below,
  const auto below = [](int i) { return i / 4 * 32 + i % 4; };  // or 16 columns on
  const auto beside = [](int j) { return j / 4 * 16 + j % 4; };
  const int64_t k_tiles = (p.k + kFmaBlockK - 1) / kFmaBlockK;

  for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
    const TileOrigin origin = tile_origin<kFmaTile>(args, tile);
    const auto offsets = p.batch.offsets_at(origin.batch);
    const auto matrix = [&](int i) {
      return static_cast<const float*>(p.batch.operands[i].data) + offsets[i];
    };
    FmaOperand a(matrix(1), origin.m, p.m, p.a.row, p.a.col, args.line_major_a, args.vector_a);
    FmaOperand b(matrix(2), origin.n, p.n, p.b.col, p.b.row, args.line_major_b, args.vector_b);
    const auto fetch = [&](int64_t k_tile) {
      const int64_t k_left = p.k - k_tile * kFmaBlockK;
      if (k_left > 0) {
        a.fetch(&shared.stages[uint32_t(k_tile) % kFmaStages][0][0][0], k_left);
        b.fetch(&shared.stages[uint32_t(k_tile) % kFmaStages][1][0][0], k_left);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };

    float sums[kFmaSquare][kFmaSquare] = {};
    bool flushed = false;
    const auto with_totals = [&](auto act) {
#pragma unroll
      for (int i = 0; i < kFmaSquare * kFmaSquare / 4; ++i) {
        float* four = &sums[i / 2][i % 2 * 4];
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

    __syncthreads();  // the last tile's stages have been read
    for (int s = 0; s < kFmaStages - 1; ++s) fetch(s);
    for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kFmaStages - 2) : "memory");
      __syncthreads();
      // Goes where the last k_tile was, which every warp has read by now.
      fetch(k_tile + kFmaStages - 1);
      const auto& stage = shared.stages[uint32_t(k_tile) % kFmaStages];
#pragma unroll
      for (int k = 0; k < kFmaBlockK; ++k) {
        float rows[kFmaSquare], columns[kFmaSquare];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const auto r = *reinterpret_cast<const float4*>(&stage[0][k][row + below(i)]);
          const auto c = *reinterpret_cast<const float4*>(&stage[1][k][column + beside(i)]);
          rows[i] = r.x, rows[i + 1] = r.y, rows[i + 2] = r.z, rows[i + 3] = r.w;
          columns[i] = c.x, columns[i + 1] = c.y, columns[i + 2] = c.z, columns[i + 3] = c.w;
        }
#pragma unroll
        for (int i = 0; i < kFmaSquare; ++i) {
#pragma unroll
          for (int j = 0; j < kFmaSquare; ++j) sums[i][j] = fmaf(rows[i], columns[j], sums[i][j]);
        }
      }
      if (uint32_t(k_tile) % (kFmaFlush / kFmaBlockK) == kFmaFlush / kFmaBlockK - 1) {
        add_totals();
        with_totals([](float* four, float4& totals) {
          totals = {four[0], four[1], four[2], four[3]};
          four[0] = four[1] = four[2] = four[3] = 0;
        });
        flushed = true;
      }
    }
    add_totals();
    asm volatile("cp.async.wait_group 0;" ::: "memory");

#pragma unroll
    for (int i = 0; i < kFmaSquare; ++i) {
      const int64_t m = origin.m + row + below(i);
#pragma unroll
      for (int j = 0; j < kFmaSquare; j += 2) {
        const int64_t n = origin.n + column + beside(j);
        const bool inside = m < p.m;
        const Place at{offsets[0] + m * p.out.row + n, m, n, inside && n < p.n,
                       inside && n + 1 < p.n};
        float pair[2] = {sums[i][j], sums[i][j + 1]};
        finish_pair<float>(epilogue, pair, at, p.batch.operands[0].data, args.second);
      }
    }
  }
#endif
}

template <class Epilogue>
cudaError_t gemm_fma(const Matmul& p, const Epilogue& epilogue, void* second, cudaStream_t stream) {
  return mma_launch_kernel(gemm_fma_kernel<Epilogue>, int(sizeof(FmaShared)), p,
                           mma_args(p, second, kFmaTile), epilogue, stream);
}

}  // namespace cuda_ops
