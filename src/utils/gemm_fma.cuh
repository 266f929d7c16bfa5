// The matrix product of float32 on ordinary multiply-adds, from sm_80 on: as exact as
// float32 is, at most of the rate that the multiply-adds have.
//
//   block    256 threads, a tile of 256 x 128 of out, 4 stages of 8 k's; one on an SM, or two
//            with 128 x 128, 128 x 64 or 64 x 64 where larger ones would leave SMs idle, the
//            last two with 3 stages of 16 k's
//   warp     a quarter of the rows by half of the columns, as 4 x 8 threads
//   thread   16 rows by 8 columns: 128 multiply-adds for 24 floats of shared memory
//
// A stage holds both operands k by k, their lines and 4 of padding, whichever way they lie
// in memory, and copies 8 k's at a time: 4 bytes where k's are neighbours (8 k's of 4 lines a
// warp, which are 32 different banks), else 16 where those are aligned. So a thread reads quads
// of lines, and any strides and any alignment take the same way.
#pragma once

#include "gemm_mma.cuh"

namespace cuda_ops {

constexpr int kFmaCopiedK = 8;
// Sums of so many products are added to totals: an error that grew with K grows with
// K / 128 and 128 apart. Totals wait in shared memory, registers are for two blocks.
constexpr int kFmaFlush = 128;

// A thread's quads of rows, 16 apart, and of columns, 32 apart.
template <int kQuadsM, int kQuadsN>
struct FmaTile {
  static constexpr int kRows = 64 * kQuadsM, kColumns = 64 * kQuadsN;
  static constexpr int kPitchRows = kRows + 4, kPitchColumns = kColumns + 4;
  static constexpr int kQuads = 4 * kQuadsM * kQuadsN;  // of sums
  // Small tiles meet less often for more code, which large ones' products would make too long.
  static constexpr int kBlockK = kQuads <= 8 ? 16 : 8, kStages = kQuads <= 8 ? 3 : 4;

  float rows[kStages][kBlockK][kPitchRows];
  float columns[kStages][kBlockK][kPitchColumns];
  float4 totals[kQuads][kMmaThreads];
};

// One operand of one tile on its way: kLines lines of a stage.
template <int kLines, int kBlockK>
struct FmaOperand {
  static constexpr int kPitch = kLines + 4;

  const float* from;
  int64_t line_stride, k_stride;  // elements
  int offset, k, left;            // floats into the stage; lines from the first on that are inside
  bool quads;

  __device__ FmaOperand(const float* matrix, int64_t first, int64_t lines, int64_t line_stride_,
                        int64_t k_stride_, bool line_major, bool vector)
      : line_stride(line_stride_), k_stride(k_stride_), quads(line_major && vector) {
    const int thread = int(threadIdx.x);
    k = line_major ? thread / 32 : thread % 8;
    const int line = line_major ? thread % 32 * (quads ? 4 : 1) : thread / 8;
    offset = k * kPitch + line;
    left = int(lines - first < kLines ? lines - first : kLines) - line;
    from = matrix + (first + line) * line_stride + k * k_stride;
  }

  // The next stage; `k_left` elements of K are left from its beginning on.
  __device__ void fetch(float* stage, int64_t k_left) {
#pragma unroll
    for (int first = 0; first < kBlockK; first += kFmaCopiedK) {
      copy(stage + first * kPitch, k_left - first);
    }
  }

  __device__ void copy(float* stage, int64_t k_left) {
    const auto to = uint32_t(__cvta_generic_to_shared(stage + offset));
    const int inside = k < k_left ? left : 0;
    if (quads) {
#pragma unroll
      for (int line = 0; line < kLines; line += 128) {
        // Of 64 lines, half of the threads have none, nor room to fill with zeros.
        if (kLines < 128 && threadIdx.x % 32 >= kLines / 4) continue;
        const int here = inside - line, bytes = here <= 0 ? 0 : here < 4 ? here * 4 : 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + 4 * line),
                     "l"(from + line), "r"(bytes)
                     : "memory");
      }
    } else {
#pragma unroll
      for (int line = 0; line < kLines; line += 32) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + 4 * line),
                     "l"(from + line * line_stride), "r"(line < inside ? 4 : 0)
                     : "memory");
      }
    }
    from += kFmaCopiedK * k_stride;
  }
};

template <int kQuadsM, int kQuadsN, class Epilogue>
__global__ void __launch_bounds__(kMmaThreads, kQuadsM* kQuadsN > 4 ? 1 : 2)
    gemm_fma_kernel(const __grid_constant__ Matmul p, const __grid_constant__ MmaArgs args,
                    const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  using Tile = FmaTile<kQuadsM, kQuadsN>;
  constexpr int kM = 4 * kQuadsM, kN = 4 * kQuadsN;  // rows and columns of a thread
  constexpr int kBlockK = Tile::kBlockK, kStages = Tile::kStages;
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<Tile*>(memory);
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int row = warp / 2 * 16 * kQuadsM + lane / 8 * 4;  // of the thread's first quad
  const int column = warp % 2 * 32 * kQuadsN + lane % 8 * 4;
  const auto below = [](int i) { return i / 4 * 16 + i % 4; };
  const auto beside = [](int j) { return j / 4 * 32 + j % 4; };
  const int64_t k_tiles = (p.k + kBlockK - 1) / kBlockK;

  for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
    const TileOrigin origin = tile_origin<Tile::kRows, Tile::kColumns>(args, tile);
    const auto offsets = p.batch.offsets_at(origin.batch);
    const auto matrix = [&](int i) {
      return static_cast<const float*>(p.batch.operands[i].data) + offsets[i];
    };
    FmaOperand<Tile::kRows, kBlockK> a(matrix(1), origin.m, p.m, p.a.row, p.a.col,
                                       args.line_major_a, args.vector_a);
    FmaOperand<Tile::kColumns, kBlockK> b(matrix(2), origin.n, p.n, p.b.col, p.b.row,
                                          args.line_major_b, args.vector_b);
    const auto fetch = [&](int64_t k_tile) {
      const int64_t k_left = p.k - k_tile * kBlockK;
      if (k_left > 0) {
        a.fetch(&shared.rows[uint32_t(k_tile) % kStages][0][0], k_left);
        b.fetch(&shared.columns[uint32_t(k_tile) % kStages][0][0], k_left);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
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

    // What a thread multiplies at one k, and at the next: loaded while it multiplies the other.
    static_assert(kBlockK % 2 == 0, "a stage begins with the first of the two");
    float rows[2][kM], columns[2][kN];
    const auto load = [&](int to, int64_t k_tile, int k) {
      const uint32_t stage = uint32_t(k_tile) % kStages;
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

    __syncthreads();  // the last tile's stages have been read
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) fetch(s);
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    __syncthreads();
    load(0, 0, 0);
    for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
#pragma unroll
      for (int k = 0; k < kBlockK; ++k) {
        if (k < kBlockK - 1) {
          load((k + 1) % 2, k_tile, k + 1);
        } else {
          // The next stage is there, and every warp has loaded what it needs of this one. Behind
          // the last one lies anything: it is never multiplied.
          asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
          __syncthreads();
          load((k + 1) % 2, k_tile + 1, 0);
          fetch(k_tile + kStages);
        }
#pragma unroll
        for (int i = 0; i < kM; ++i) {
#pragma unroll
          for (int j = 0; j < kN; ++j) {
            sums[i][j] = fmaf(rows[k % 2][i], columns[k % 2][j], sums[i][j]);
          }
        }
      }
      if (uint32_t(k_tile) % (kFmaFlush / kBlockK) == kFmaFlush / kBlockK - 1) {
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
    for (int i = 0; i < kM; ++i) {
      const int64_t m = origin.m + row + below(i);
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
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

template <int kQuadsM, int kQuadsN, class Epilogue>
cudaError_t fma_launch(const Matmul& p, const Epilogue& epilogue, void* second,
                       cudaStream_t stream) {
  using Tile = FmaTile<kQuadsM, kQuadsN>;
  return mma_launch_kernel(gemm_fma_kernel<kQuadsM, kQuadsN, Epilogue>, int(sizeof(Tile)), p,
                           mma_args(p, second, Tile::kRows, Tile::kColumns), epilogue, stream);
}

// `rows` and `columns` of a tile. A layer has 128 x 128 alone: each is a kernel for each of its
// epilogues.
template <bool kLinear, class Epilogue>
cudaError_t gemm_fma(const Matmul& p, int rows, int columns, const Epilogue& epilogue, void* second,
                     cudaStream_t stream) {
  if (rows == 128 && columns == 128) return fma_launch<2, 2>(p, epilogue, second, stream);
  if constexpr (!kLinear) {
    if (rows == 256 && columns == 128) return fma_launch<4, 2>(p, epilogue, second, stream);
    if (rows == 128 && columns == 64) return fma_launch<2, 1>(p, epilogue, second, stream);
    if (rows == 64 && columns == 64) return fma_launch<1, 1>(p, epilogue, second, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace cuda_ops
