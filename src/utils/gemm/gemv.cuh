// One or two float32 vectors times a large matrix whose lines are K-major: nothing to reuse but
// the vectors, so the matrix is streamed once at the memory's bandwidth, by ordinary
// loads that are all in flight at once.
//
//   block   8 warps, kLines neighboring lines of the matrix
//   warp    an eighth of K: 32 lanes x 16 bytes x kLines loads before the first use
//
// Partial sums meet in shared memory and are added in the order of the warps.
#pragma once

#include "gemm/gemm_epilogue.cuh"
#include "gemm/matmul.h"

namespace cuda_ops {

constexpr int kGemvWarps = 8, kGemvLines = 4;

struct GemvArgs {
  int64_t lines, vectors;              // columns of out and its rows; the other way round if `swap`
  int64_t line_stride, vector_stride;  // elements; K is dense in both
  int64_t blocks;                      // for each matrix
  void* second;
  bool swap;  // the matrix is a, the vectors are columns of b
};

inline GemvArgs gemv_args(const Matmul& p, bool swap, int block_lines, void* second) {
  GemvArgs args{};
  args.swap = swap;
  args.lines = swap ? p.m : p.n;
  args.vectors = swap ? p.n : p.m;
  args.line_stride = swap ? p.a.row : p.b.col;
  args.vector_stride = swap ? p.b.col : p.a.row;
  args.blocks = (args.lines + block_lines - 1) / block_lines;
  args.second = second;
  return args;
}

template <int kVectors, class Epilogue>
__global__ void __launch_bounds__(32 * kGemvWarps)
    gemv_kernel(const __grid_constant__ Matmul p, const __grid_constant__ GemvArgs args,
                const __grid_constant__ Epilogue epilogue) {
  constexpr int kLoad = 4, kStep = 32 * kGemvWarps * kLoad;
  __shared__ float partials[kGemvWarps][kVectors * kGemvLines];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  // Blocks live for a microsecond or two: no 64-bit division at their start.
  const auto blocks = unsigned(args.blocks);
  const auto offsets = p.batch.dims == 0 ? decltype(p.batch.offsets_at(0)){}
                                         : p.batch.offsets_at(blockIdx.x / blocks);
  const int64_t first = int64_t(blockIdx.x % blocks) * kGemvLines;
  const auto data = [&](int i) {
    return static_cast<const float*>(p.batch.operands[i].data) + offsets[i];
  };
  const float* lines = data(args.swap ? 1 : 2);
  const float* vectors = data(args.swap ? 2 : 1);

  // A line or vector beyond the last one is that one again, and not stored.
  const float *line[kGemvLines], *vector[kVectors];
#pragma unroll
  for (int i = 0; i < kGemvLines; ++i) {
    const int64_t at = first + i < args.lines ? first + i : args.lines - 1;
    line[i] = lines + at * args.line_stride;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    vector[v] = vectors + (v < args.vectors ? v : args.vectors - 1) * args.vector_stride;
  }

  float sums[kVectors][kGemvLines] = {};
#pragma unroll 2
  for (int64_t k = int64_t(threadIdx.x) * kLoad; k < p.k; k += kStep) {
    float4 weights[kGemvLines];
    // Past the L1 cache: they are not read again.
#pragma unroll
    for (int i = 0; i < kGemvLines; ++i) {
      weights[i] = __ldcs(reinterpret_cast<const float4*>(line[i] + k));
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float4 values = __ldg(reinterpret_cast<const float4*>(vector[v] + k));
#pragma unroll
      for (int i = 0; i < kGemvLines; ++i) {
        sums[v][i] = fmaf(weights[i].x, values.x, sums[v][i]);
        sums[v][i] = fmaf(weights[i].y, values.y, sums[v][i]);
        sums[v][i] = fmaf(weights[i].z, values.z, sums[v][i]);
        sums[v][i] = fmaf(weights[i].w, values.w, sums[v][i]);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kGemvLines; ++i) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        sums[v][i] += __shfl_xor_sync(~0u, sums[v][i], step);
      }
      if (lane == 0) partials[warp][v * kGemvLines + i] = sums[v][i];
    }
  }
  __syncthreads();
  const int mine = int(threadIdx.x);
  if (mine >= kVectors * kGemvLines) return;
  float total[2] = {};
#pragma unroll
  for (int w = 0; w < kGemvWarps; ++w) total[0] += partials[w][mine];
  const int64_t l = first + mine % kGemvLines, v = mine / kGemvLines;
  const int64_t m = args.swap ? l : v, n = args.swap ? v : l;
  const bool inside = l < args.lines && v < args.vectors;
  const Place at{offsets[0] + m * p.out.row + n * p.out.col, m, n, inside, false};
  finish_pair<float>(epilogue, total, at, p.batch.operands[0].data, args.second);
}

template <class Epilogue>
cudaError_t gemv(const Matmul& p, const Epilogue& epilogue, void* second, bool swap,
                 cudaStream_t stream) {
  const GemvArgs args = gemv_args(p, swap, kGemvLines, second);
  const auto kernel = args.vectors <= 1 ? gemv_kernel<1, Epilogue> : gemv_kernel<2, Epilogue>;
  kernel<<<unsigned(args.blocks * p.batch.numel), 32 * kGemvWarps, 0, stream>>>(p, args, epilogue);
  return cudaGetLastError();
}

}  // namespace cuda_ops
