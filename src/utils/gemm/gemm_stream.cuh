// A large matrix times up to 32 vectors, both K-major: the loops of gemm_stream_sums.cuh.
//
//   block   8 warps, `splits` of which share the K of the same lines
//   warp    16 lines and up to 8 vectors, or 32 lines and more
//
// Partial sums meet in shared memory, laid out as out, and are added in the order of warps.
// The kernel starts while the one before it ends (early_start.cuh).
#pragma once

#include "ptx/early_start.cuh"
#include "gemm/gemm_stream_sums.cuh"
#include "gemm/gemv.cuh"
#include "ptx/planned.cuh"

namespace cuda_ops {

template <class T, int kTile, class Epilogue>
__global__ void __launch_bounds__(32 * kStreamWarps, stream_resident(kTile))
    gemm_stream_kernel(const __grid_constant__ Matmul p, const __grid_constant__ GemvArgs args,
                       int splits, const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  if (kTile > 8 && kPlannedForHopper) return;
  constexpr int kLines = stream_lines(kTile), kBlocks = kLines / 16, kCols = kTile / 8;
  // Rows of lines or of vectors, with padding against bank conflicts.
  constexpr int kFloats = kLines * (kTile + 4);
  static_assert(kLines >= kTile);
  __shared__ __align__(16) float partials[kStreamWarps * kFloats];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  // No divisions by `splits`, a power of two: blocks live for a few microseconds.
  const int shift = __popc(unsigned(splits) - 1);
  const int part = warp & (splits - 1), place = warp >> shift;
  const unsigned tiles = unsigned(args.blocks);
  const int width = kStreamWarps * kLines >> shift;
  const int64_t first = int64_t(blockIdx.x % tiles) * width;

  const StreamRange range(int(p.k), part, splits);
  const int from = range.begin + lane % 4 * 8;
  int64_t line_at[2 * kBlocks], vector_at[kCols];
  // A line or vector beyond the last one is that one again, and not stored.
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int64_t line = first + place * kLines + 8 * i + lane / 4;
    line_at[i] = (line < args.lines ? line : args.lines - 1) * args.line_stride + from;
  }
#pragma unroll
  for (int c = 0; c < kCols; ++c) {
    const int64_t vector = 8 * c + lane / 4;
    vector_at[c] = (vector < args.vectors ? vector : args.vectors - 1) * args.vector_stride + from;
  }
  // Not earlier: without this branch in between, the compiler moves the loads behind the wait.
  const auto offsets = p.batch.dims == 0 ? decltype(p.batch.offsets_at(0)){}
                                         : p.batch.offsets_at(blockIdx.x / tiles);
  const auto data = [&](int i) {
    return static_cast<const T*>(p.batch.operands[i].data) + offsets[i];
  };
  const T *a = data(1), *b = data(2), *matrix = args.swap ? a : b;
  const T* few = after_previous(args.swap ? b : a);
  let_next_start();
  const T *lines[kBlocks][2], *vectors[kCols];
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) lines[i / 2][i % 2] = matrix + line_at[i];
#pragma unroll
  for (int c = 0; c < kCols; ++c) vectors[c] = few + vector_at[c];
  float sums[kBlocks][kCols][4] = {};
  stream_sums(lines, vectors, range, sums);

  const int line_step = args.swap ? kTile + 4 : 1, vector_step = args.swap ? 1 : kLines + 4;
#pragma unroll
  for (int i = 0; i < kBlocks * kCols; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int line = i / kCols * 16 + lane / 4 + j / 2 * 8;
      const int vector = i % kCols * 8 + lane % 4 * 2 + j % 2;
      partials[warp * kFloats + line * line_step + vector * vector_step] =
          sums[i / kCols][i % kCols][j];
    }
  }
  __syncthreads();

  // Pairs of a row of out.
  const int row_pairs = (args.swap ? kTile : width) / 2,
            row_shift = __popc(unsigned(row_pairs) - 1);
  for (int i = int(threadIdx.x); i < width * kTile / 2; i += 32 * kStreamWarps) {
    const int row = i >> row_shift, column = (i & (row_pairs - 1)) * 2;
    const int line = args.swap ? row : column, vector = args.swap ? column : row;
    const int64_t m = args.swap ? first + line : vector, n = args.swap ? vector : first + line;
    if (m >= p.m || n >= p.n) continue;
    const float* sum = partials + line / kLines * splits * kFloats + line % kLines * line_step +
                       vector * vector_step;
    float total[2] = {};
    // Unrolled: several loads are on their way.
#pragma unroll 4
    for (int w = 0; w < splits; ++w) {
      const float2 pair = *reinterpret_cast<const float2*>(sum + w * kFloats);
      total[0] += pair.x, total[1] += pair.y;
    }
    const Place at{offsets[0] + m * p.out.row + n, m, n, true, n + 1 < p.n};
    finish_pair<T>(epilogue, total, at, p.batch.operands[0].data, args.second);
  }
#endif
}

template <class T, class Epilogue>
cudaError_t gemm_stream(const Matmul& p, const StreamConfig& config, const Epilogue& epilogue,
                        void* second, cudaStream_t stream) {
  const GemvArgs args = gemv_args(p, config.swap, config.lines(), second);
  const auto kernel = config.tile == 8    ? gemm_stream_kernel<T, 8, Epilogue>
                      : config.tile == 16 ? gemm_stream_kernel<T, 16, Epilogue>
                                          : gemm_stream_kernel<T, 32, Epilogue>;
  return launch_early(kernel, unsigned(config.grid), 32 * kStreamWarps, 0, stream, p, args,
                      config.splits, epilogue);
}

}  // namespace cuda_ops
