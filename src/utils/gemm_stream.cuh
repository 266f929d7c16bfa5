// A large matrix times up to 64 vectors, both K-major: the loops of gemm_stream_sums.cuh.
//
//   cluster   `ranks` blocks (1 before sm_90) with the same lines, a part of K each
//   block     8 warps, `splits` of which share the K of the same lines again
//   warp      16 lines and up to 8 vectors, or 32 lines and more
//
// What binds beside the memory are the vectors: each block reads all of its part of K,
// from the L2 cache what other blocks of its SM have not left in L1. A block of 16 lines
// and 8 vectors so asks the L2 cache for half as much again as the matrix has, and 32
// lines and 32 vectors for twice as much: many vectors want all warps on lines of their
// own, and K shared out to the cluster. From L1 to registers go 1/2, 1/2, 1 and 2 bytes of
// 8, 16, 32 and 64 vectors for each of the matrix; memory gives an SM 19 of those a cycle,
// and L1 gives 128.
//
// Partial sums meet in shared memory, laid out as out, and are added in the order of warps
// and ranks.
#pragma once

#include "gemm_stream_sums.cuh"
#include "gemv.cuh"
#include "mbarrier.cuh"

namespace cuda_ops {

// Two neighbours in the shared memory of the cluster's block `rank`.
__device__ inline float2 pair_of_rank(const float* at, int rank) {
  float2 pair{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(in_block(shared_address(at), uint32_t(rank)))
               : "memory");
#endif
  return pair;
}

// Waits for all threads of the cluster, be it one block.
__device__ inline void stream_sync(int ranks) {
#if __CUDA_ARCH__ >= 900
  if (ranks > 1) return cluster_sync();
#endif
  __syncthreads();
}

template <class T, int kTile, bool kRing, class Epilogue>
__global__ void __launch_bounds__(32 * kStreamWarps, stream_resident(kTile))
    gemm_stream_kernel(const __grid_constant__ Matmul p, const __grid_constant__ GemvArgs args,
                       int splits, int ranks, const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  constexpr int kLines = stream_lines(kTile), kBlocks = kLines / 16, kCols = kTile / 8;
  constexpr int kFloats = stream_shared(kTile, kRing) / 4;
  extern __shared__ __align__(16) float partials[];  // a warp's part is its ring before
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int part = warp % splits, place = warp / splits;
  const int rank = int(blockIdx.x % unsigned(ranks));
  const unsigned tile = blockIdx.x / unsigned(ranks), tiles = unsigned(args.blocks);
  const auto offsets =
      p.batch.dims == 0 ? decltype(p.batch.offsets_at(0)){} : p.batch.offsets_at(tile / tiles);
  const auto data = [&](int i) {
    return static_cast<const T*>(p.batch.operands[i].data) + offsets[i];
  };
  const T *a = data(1), *b = data(2), *matrix = args.swap ? a : b, *few = args.swap ? b : a;
  const int width = kStreamWarps / splits * kLines;
  const int64_t first = int64_t(tile % tiles) * width;

  const StreamRange range(int(p.k), rank * splits + part, ranks * splits);
  const int from = range.begin + lane % 4 * 8;
  const T *lines[kBlocks][2], *vectors[kCols];
  // A line or vector beyond the last one is that one again, and not stored.
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int64_t line = first + place * kLines + 8 * i + lane / 4;
    const int64_t at = line < args.lines ? line : args.lines - 1;
    lines[i / 2][i % 2] = matrix + at * args.line_stride + from;
  }
#pragma unroll
  for (int c = 0; c < kCols; ++c) {
    const int64_t vector = 8 * c + lane / 4;
    const int64_t at = vector < args.vectors ? vector : args.vectors - 1;
    vectors[c] = few + at * args.vector_stride + from;
  }
  float sums[kBlocks][kCols][4] = {};
  if constexpr (kRing) {
    const uint32_t ring = shared_address(partials + warp * kFloats);
    stream_sums_ring(lines, vectors, range, ring, sums);
    __syncwarp();
  } else {
    stream_sums(lines, vectors, range, sums);
  }

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
  stream_sync(ranks);

  // Pairs of a row of out, shared out to the threads of all ranks.
  const int threads = 32 * kStreamWarps, row_pairs = (args.swap ? kTile : width) / 2;
  for (int i = rank * threads + int(threadIdx.x); i < width * kTile / 2; i += ranks * threads) {
    const int row = i / row_pairs, column = i % row_pairs * 2;
    const int line = args.swap ? row : column, vector = args.swap ? column : row;
    const int64_t m = args.swap ? first + line : vector, n = args.swap ? vector : first + line;
    if (m >= p.m || n >= p.n) continue;
    const float* sum = partials + line / kLines * splits * kFloats + line % kLines * line_step +
                       vector * vector_step;
    float total[2] = {};
    const auto add = [&](float2 pair) { total[0] += pair.x, total[1] += pair.y; };
    // Unrolled: several loads are on their way.
    for (int w = 0; ranks > 1 && w < splits; ++w) {
#pragma unroll 4
      for (int r = 0; r < ranks; ++r) add(pair_of_rank(sum + w * kFloats, r));
    }
#pragma unroll 4
    for (int w = 0; ranks == 1 && w < splits; ++w) {
      add(*reinterpret_cast<const float2*>(sum + w * kFloats));
    }
    const Place at{offsets[0] + m * p.out.row + n, m, n, true, n + 1 < p.n};
    finish_pair<T>(epilogue, total, at, p.batch.operands[0].data, args.second);
  }
#if __CUDA_ARCH__ >= 900
  // No block leaves while another one of its cluster may read its sums.
  if (ranks > 1) cluster_meet();
#endif
#endif
}

// `kRing`: the first tile with a ring, for what times the others too.
template <class T, int kRing = kStreamRing, class Epilogue>
cudaError_t gemm_stream(const Matmul& p, const StreamConfig& config, const Epilogue& epilogue,
                        void* second, cudaStream_t stream) {
  const GemvArgs args = gemv_args(p, config.swap, config.lines(), second);
  const auto kernel = config.tile == 8    ? gemm_stream_kernel<T, 8, (8 >= kRing), Epilogue>
                      : config.tile == 16 ? gemm_stream_kernel<T, 16, (16 >= kRing), Epilogue>
                      : config.tile == 32 ? gemm_stream_kernel<T, 32, (32 >= kRing), Epilogue>
                                          : gemm_stream_kernel<T, 64, (64 >= kRing), Epilogue>;
  const int shared = kStreamWarps * stream_shared(config.tile, config.tile >= kRing);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(config.ranks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(config.grid));
  launch.blockDim = dim3(32 * kStreamWarps);
  launch.dynamicSmemBytes = size_t(shared);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = config.ranks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, p, args, config.splits, config.ranks, epilogue);
}

}  // namespace cuda_ops
