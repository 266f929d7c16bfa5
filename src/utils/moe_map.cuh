// Assignments by expert: a stable counting sort. Counts are integers, so the order in
// which they are added changes nothing, and every place follows from the counts: the
// same map every time.
//
//   count    a warp for each chunk of assignments: how many of each expert
//   add up   one block: where each expert begins, and each chunk within it
//   place    a warp for each chunk, 32 assignments at a time: ranks by __match_any_sync
//
// Up to 1024 assignments one warp does all three.
#pragma once

#include <cuda_runtime.h>

#include "moe.h"

namespace cuda_ops {

constexpr int kMostBins = int(kMostExperts) + 1;  // the last one for assignments of no expert

// starts[i] = the values of 0 ... i - 1 added up, starts[count] those of all. By one
// warp; every value is asked for once, by lane i % 32.
template <class Value>
__device__ void warp_add_up(int count, int32_t* starts, const Value& value) {
  const int lane = int(threadIdx.x) % 32;
  int32_t total = 0;
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    const int32_t own = i < count ? value(i) : 0;
    int32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t left = __shfl_up_sync(~0u, sum, unsigned(step));
      if (lane >= step) sum += left;
    }
    if (i < count) starts[i] = total + sum - own;
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) starts[count] = total;
}

__device__ inline int bin_of(const MoeMap& p, int64_t assignment) {
  const int64_t expert = p.chosen[assignment];
  return expert >= 0 && expert < p.experts ? int(expert) : int(p.experts);
}

// Calls `body(assignment, bin)`, 32 neighbours at a time, in order; beyond the end the bin
// is -1. By one warp, which is alone on its SM: it waits for memory once in eight rounds.
template <class Body>
__device__ void for_each_bin(const MoeMap& p, int64_t begin, int64_t end, const Body& body) {
  constexpr int kRounds = 8;
  const int lane = int(threadIdx.x) % 32;
  for (int64_t first = begin; first < end; first += 32 * kRounds) {
    int bins[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t i = first + 32 * r + lane;
      bins[r] = i < end ? bin_of(p, i) : -1;
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (first + 32 * r < end) body(first + 32 * r + lane, bins[r]);
    }
  }
}

// By one warp. `bins` is shared memory.
__device__ inline void count_chunk(const MoeMap& p, int64_t begin, int64_t end, int32_t* bins) {
  for (int i = int(threadIdx.x) % 32; i <= p.experts; i += 32) bins[i] = 0;
  __syncwarp();
  for_each_bin(p, begin, end, [&](int64_t, int bin) {
    if (bin >= 0) atomicAdd(&bins[bin], 1);
  });
  __syncwarp();
}

// By one warp. `next` is shared memory: where the next assignment of each bin goes.
__device__ inline void place_chunk(const MoeMap& p, int64_t begin, int64_t end, int32_t* next) {
  const uint32_t before = (1u << threadIdx.x % 32) - 1;  // the lanes before this one
  for_each_bin(p, begin, end, [&](int64_t assignment, int bin) {
    const uint32_t alike = __match_any_sync(~0u, bin);
    const int rank = __popc(alike & before);
    const int32_t base = bin >= 0 ? next[bin] : 0;
    __syncwarp();
    if (bin >= 0 && rank == 0) next[bin] = base + __popc(alike);
    if (bin >= 0) p.order[base + rank] = int32_t(assignment);
    __syncwarp();
  });
}

__device__ inline int64_t chunk_end(const MoeMap& p, int64_t begin, int64_t chunk) {
  return p.assignments - begin < chunk ? p.assignments : begin + chunk;
}

// --- kernels ------------------------------------------------------------------

static __global__ void __launch_bounds__(32) moe_count_kernel(const MoeMap p, int64_t chunk) {
  __shared__ int32_t bins[kMostBins];
  const int64_t begin = int64_t(blockIdx.x) * chunk;
  count_chunk(p, begin, chunk_end(p, begin, chunk), bins);
  int32_t* counts = p.counts + int64_t(blockIdx.x) * (p.experts + 1);
  for (int i = int(threadIdx.x); i <= p.experts; i += 32) counts[i] = bins[i];
}

// A thread for each bin: counts become places within the bin.
static __global__ void __launch_bounds__(544) moe_add_up_kernel(const MoeMap p, int64_t chunks) {
  __shared__ int32_t bins[kMostBins], starts[kMostBins + 1];
  const int bin = int(threadIdx.x), count = int(p.experts) + 1;
  if (bin < count) {
    constexpr int kAhead = 8;  // counts that are read at once
    int32_t sum = 0;
    for (int64_t first = 0; first < chunks; first += kAhead) {
      int32_t own[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        own[a] = first + a < chunks ? p.counts[(first + a) * count + bin] : 0;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (first + a < chunks) p.counts[(first + a) * count + bin] = sum;
        sum += own[a];
      }
    }
    bins[bin] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) warp_add_up(count, starts, [&](int i) { return bins[i]; });
  __syncthreads();
  if (bin < count) p.offsets[bin] = starts[bin];
}

static __global__ void __launch_bounds__(32) moe_place_kernel(const MoeMap p, int64_t chunk) {
  __shared__ int32_t next[kMostBins];
  const int64_t begin = int64_t(blockIdx.x) * chunk;
  const int32_t* counts = p.counts + int64_t(blockIdx.x) * (p.experts + 1);
  for (int i = int(threadIdx.x); i <= p.experts; i += 32) next[i] = p.offsets[i] + counts[i];
  __syncwarp();
  place_chunk(p, begin, chunk_end(p, begin, chunk), next);
}

static __global__ void __launch_bounds__(32) moe_map_kernel(const MoeMap p) {
  __shared__ int32_t bins[kMostBins], next[kMostBins + 1];
  count_chunk(p, 0, p.assignments, bins);
  warp_add_up(int(p.experts) + 1, next, [&](int i) { return bins[i]; });
  __syncwarp();
  for (int i = int(threadIdx.x); i <= p.experts; i += 32) p.offsets[i] = next[i];
  __syncwarp();
  place_chunk(p, 0, p.assignments, next);
}

// -----------------------------------------------------------------------------

inline cudaError_t moe_map(const MoeMap& p, cudaStream_t stream) {
  const int64_t chunk = moe_map_chunk(p.assignments), chunks = moe_map_chunks(p.assignments);
  if (chunks <= 1) {
    moe_map_kernel<<<1, 32, 0, stream>>>(p);
    return cudaGetLastError();
  }
  const auto threads = unsigned((p.experts + 1 + 31) / 32 * 32);
  moe_count_kernel<<<unsigned(chunks), 32, 0, stream>>>(p, chunk);
  moe_add_up_kernel<<<1, threads, 0, stream>>>(p, chunks);
  moe_place_kernel<<<unsigned(chunks), 32, 0, stream>>>(p, chunk);
  return cudaGetLastError();
}

}  // namespace cuda_ops
