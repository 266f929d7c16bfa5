// Assignments by expert: a stable counting sort. Counts are integers, so the order in
// which they are added changes nothing, and every place follows from the counts: the
// same map every time.
//
//   count    a block for each chunk of assignments: how many of each expert
//   place    the same chunks: adds up all counts, ranks 32 assignments at a time
//
// One chunk is placed without having been counted.
#pragma once

#include "ptx/early_start.cuh"
#include "moe/moe.h"
#include "ptx/warp.cuh"

namespace cuda_ops {

// The bins of the experts, one for assignments of no expert, and one for numbers beyond the last
// assignment.
constexpr int kMostBins = int(kMostExperts) + 4, kBinBits = 10;
static_assert(moe_map_bins(kMostExperts) <= kMostBins && kMostExperts + 2 <= kMostBins);

// starts[i] = the sum of the values 0 ... i - 1; starts[count] is the sum of all. By one warp: each
// lane has a run of neighbors. `starts` may be where the values are.
template <class Value>
__device__ void warp_add_up(int count, int32_t* starts, const Value& value) {
  const int lane = int(threadIdx.x) % 32, run = (count + 31) / 32;
  const int begin = lane * run < count ? lane * run : count;
  const int end = count - begin < run ? count : begin + run;
  int32_t own = 0;
#pragma unroll 4
  for (int i = begin; i < end; ++i) own += value(i);
  const int32_t sum = sum_up_to_lane(own);
  int32_t start = sum - own;
#pragma unroll 4
  for (int i = begin; i < end; ++i) {
    const int32_t next = start + value(i);
    starts[i] = start;
    start = next;
  }
  if (lane == 31) starts[count] = sum;
}

__device__ inline int bin_of(const MoeMap& p, int64_t assignment) {
  const int64_t expert = p.chosen[assignment];
  return expert >= 0 && expert < p.experts ? int(expert) : int(p.experts);
}

// The same before waiting for the kernel before, which did not write it: from the L2 cache.
__device__ inline int fresh_bin_of(const MoeMap& p, int64_t assignment) {
  int64_t expert;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];"
               : "=l"(expert)
               : "l"(p.chosen + assignment)
               : "memory");
  return expert >= 0 && expert < p.experts ? int(expert) : int(p.experts);
}

// The bins of the assignments begin, begin + step, ... below `end`, all read at once;
// experts + 1 beyond.
__device__ inline void load_bins(const MoeMap& p, int64_t begin, int step, int64_t end,
                                 int (&bins)[kMapRounds]) {
#pragma unroll
  for (int r = 0; r < kMapRounds; ++r) {
    const int64_t i = begin + step * r;
    bins[r] = i < end ? bin_of(p, i) : int(p.experts) + 1;
  }
}

__device__ inline int64_t chunk_end(const MoeMap& p, int64_t begin, int64_t chunk) {
  return p.assignments - begin < chunk ? p.assignments : begin + chunk;
}

// Adds up the counts of all chunks, and of those before the block's. The whole block calls it; both
// arrays are shared memory and start as zeros.
__device__ inline void add_up_chunks(const MoeMap& p, int32_t* all, int32_t* before) {
  const int vectors = moe_map_bins(p.experts) / 4, parts = kMapThreads / vectors;
  const int vector = int(threadIdx.x) % vectors, part = int(threadIdx.x) / vectors;
  if (part >= parts) return;
  const auto* counts = reinterpret_cast<const int4*>(p.counts) + vector;
  int32_t sums[4] = {}, sums_before[4] = {};
#pragma unroll 8
  for (int c = part; c < int(gridDim.x); c += parts) {
    const int4 one = counts[c * vectors];
    const int32_t own[4] = {one.x, one.y, one.z, one.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] += own[i];
      if (c < int(blockIdx.x)) sums_before[i] += own[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    atomicAdd(&all[4 * vector + i], sums[i]);
    atomicAdd(&before[4 * vector + i], sums_before[i]);
  }
}

// --- kernels ------------------------------------------------------------------

static __global__ void __launch_bounds__(kMapThreads)
    moe_count_kernel(const MoeMap p, int64_t chunk) {
  __shared__ int32_t counts[kMostBins];
  const int thread = int(threadIdx.x), width = moe_map_bins(p.experts);
  for (int i = thread; i < kMostBins; i += kMapThreads) counts[i] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();
  const int64_t begin = int64_t(blockIdx.x) * chunk, end = chunk_end(p, begin, chunk);
  for (int64_t first = begin; first < end; first += kMapStep) {
    int bins[kMapRounds];
    load_bins(p, first + thread, kMapThreads, end, bins);
#pragma unroll
    for (int r = 0; r < kMapRounds; ++r) {
      if (bins[r] <= p.experts) atomicAdd(&counts[bins[r]], 1);
    }
  }
  __syncthreads();
  for (int i = thread; i < width; i += kMapThreads) {
    p.counts[int64_t(blockIdx.x) * width + i] = counts[i];
  }
}

static __global__ void __launch_bounds__(kMapThreads)
    moe_place_kernel(const MoeMap p, int64_t chunk) {
  // For a step: how many each warp has, then where they begin among those of the expert.
  __shared__ int32_t counts[kMapThreads / 32][kMostBins];
  __shared__ int32_t starts[kMostBins + 1], next[kMostBins];
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int bins = int(p.experts) + 1, bits = 32 - __clz(bins);
  const bool alone = gridDim.x == 1;
  for (int i = thread; i < kMostBins; i += kMapThreads) starts[i] = next[i] = 0;
  wait_for_previous();
  let_next_start();
  if (blockIdx.x == 0 && thread < kMapProducts) p.taken[thread] = 0;
  __syncthreads();
  const auto add_up = [&](const int32_t* totals) {
    if (warp == 0) warp_add_up(bins, starts, [&](int i) { return totals[i]; });
    __syncthreads();
    if (blockIdx.x > 0) return;
    for (int i = thread; i < bins; i += kMapThreads) p.offsets[i] = starts[i];
  };

  int64_t first = int64_t(blockIdx.x) * chunk;
  const int64_t end = chunk_end(p, first, chunk);
  if (!alone) {
    add_up_chunks(p, starts, next);
    __syncthreads();
    add_up(starts);
  }
  do {
    // Each warp has a run of neighbors, and all of them the same number of rounds.
    const int64_t left = end - first;
    const int rounds = left < kMapStep ? int(left + kMapThreads - 1) / kMapThreads : kMapRounds;
    const int64_t begin = first + warp * 32 * rounds;
    int bin[kMapRounds], rank[kMapRounds];
    load_bins(p, begin + lane, 32, begin + 32 * rounds < end ? begin + 32 * rounds : end, bin);
    for (int i = lane; i <= bins; i += 32) counts[warp][i] = 0;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kMapRounds; ++r) {
      if (r >= rounds) break;
      const uint32_t alike = lanes_alike<kBinBits>(uint32_t(bin[r]), bits);
      rank[r] = counts[warp][bin[r]] + __popc(alike & ((1u << lane) - 1));
      __syncwarp();
      if (alike >> lane == 1) counts[warp][bin[r]] = rank[r] + 1;  // the last one
      __syncwarp();
    }
    __syncthreads();
    for (int i = thread; i < bins; i += kMapThreads) {
      int32_t at = next[i];
#pragma unroll
      for (int w = 0; w < kMapThreads / 32; ++w) {
        const int32_t own = counts[w][i];
        counts[w][i] = at;
        at += own;
      }
      next[i] = at;
    }
    __syncthreads();
    if (alone) add_up(next);
#pragma unroll
    for (int r = 0; r < kMapRounds; ++r) {
      if (r >= rounds) break;
      if (bin[r] >= bins) continue;
      p.order[starts[bin[r]] + counts[warp][bin[r]] + rank[r]] = int32_t(begin + 32 * r + lane);
    }
    __syncthreads();
    first += kMapStep;
  } while (first < end);
}

// -----------------------------------------------------------------------------

inline cudaError_t moe_map(const MoeMap& p, cudaStream_t stream) {
  const int64_t chunk = moe_map_chunk(p.assignments);
  const auto chunks = unsigned(moe_map_chunks(p.assignments));
  if (chunks <= 1) return launch_early(moe_place_kernel, 1, kMapThreads, 0, stream, p, chunk);
  const cudaError_t error =
      launch_early(moe_count_kernel, chunks, kMapThreads, 0, stream, p, chunk);
  if (error != cudaSuccess) return error;
  return launch_early(moe_place_kernel, chunks, kMapThreads, 0, stream, p, chunk);
}

}  // namespace cuda_ops
