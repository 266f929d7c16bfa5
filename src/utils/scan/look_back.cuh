// Sums over the parts before one's own, in the kernel that sums each part (Merrill and Garland,
// Single-pass Parallel Prefix Scan with Decoupled Look-back, NVR-2016-002): each block says what
// its part sums up to as soon as it knows, adds up what those before it say, and says the sum up to
// its own end.
//
// The sum up to a part's end is always that up to the one before, plus its own. A block that finds
// it some parts back adds the others in the same order, so the bits do not depend on which blocks
// were faster.
//
// Blocks start in the order of their index, which CUB's scan relies on too: a block waits for such
// with a lower index alone.
#pragma once

#include <cstdint>

#include "dtype.cuh"

namespace cuda_ops {

// Parts back that a block looks at.
constexpr int kMostLooked = 128;

enum PartState : uint32_t { kNothing, kOwnSum, kSumUpTo };

__device__ inline uint32_t load_state(const uint32_t* at) {
  uint32_t state;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(state) : "l"(at) : "memory");
  return state;
}
__device__ inline void store_state(uint32_t* at, PartState state) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(uint32_t(state)) : "memory");
}

// The parts of `lines` lines, a block each: first those at the beginning of each line, then the
// next. A part is `lanes` packs wide.
template <class C>
struct Parts {
  uint32_t* states;
  C* sums;
  int64_t lines;
  int lanes;
};

// The first warp says what the part sums up to, one lane for each pack.
template <class C, int kPack>
__device__ void say(const Parts<C>& parts, PartState state, const C (&sum)[kPack]) {
  const int lane = int(threadIdx.x);
  if (lane >= 32) return;
  if (lane < parts.lanes) {
    const int64_t at = (int64_t(blockIdx.x) * 2 + (state == kSumUpTo)) * parts.lanes + lane;
#pragma unroll
    for (int v = 0; v < kPack; ++v) parts.sums[at * kPack + v] = sum[v];
  }
  __syncwarp();
  if (lane == 0) store_state(parts.states + blockIdx.x, state);
}

// Returns how many parts back the first sum up to an end is, once there is one and all parts
// between have said their own. Called by a whole warp.
__device__ inline int nearest_sum(const uint32_t* states, int64_t lines, int window) {
  const int lane = int(threadIdx.x) % 32;
  for (;;) {
    for (int first = 1; first <= window; first += 32) {
      const int back = first + lane;
      const uint32_t state =
          back <= window ? load_state(states + blockIdx.x - back * lines) : uint32_t(kNothing);
      const unsigned up_to = __ballot_sync(~0u, state == kSumUpTo);
      const unsigned nothing = __ballot_sync(~0u, state == kNothing);
      const int found = up_to == 0 ? 32 : __ffs(int(up_to)) - 1;
      const int missing = nothing == 0 ? 32 : __ffs(int(nothing)) - 1;
      if (found < missing) return first + found;
      if (missing < 32) break;  // look at the nearest again
    }
  }
}

// Says what part `part` of a line sums up to, and puts the sum of those before into `earlier`. All
// threads call; `own` is that of the thread's pack, threadIdx.x % lanes. `shared` has room for one
// pack a thread, and nothing else in it is needed.
template <class C, int kPack>
__device__ void look_back(const Parts<C>& parts, int64_t part, const C (&own)[kPack], C* shared,
                          C (&earlier)[kPack]) {
  __shared__ int distance;
#pragma unroll
  for (int v = 0; v < kPack; ++v) earlier[v] = 0;
  if (part == 0) return say(parts, kSumUpTo, own);
  say(parts, kOwnSum, own);
  const int lanes = parts.lanes, lane = int(threadIdx.x) % lanes, slot = int(threadIdx.x) / lanes;
  if (threadIdx.x < 32) {
    int window = int(blockDim.x) / lanes;
    if (window > kMostLooked) window = kMostLooked;
    if (window > part) window = int(part);
    const int found = nearest_sum(parts.states, parts.lines, window);
    if (threadIdx.x == 0) distance = found;
  }
  __syncthreads();
  const int count = distance;
  if (slot < count) {
    const int64_t block = blockIdx.x - (slot + 1) * parts.lines;
    const int64_t at = (block * 2 + (slot + 1 == count)) * lanes + lane;
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      shared[threadIdx.x * kPack + v] = __ldcg(parts.sums + at * kPack + v);
    }
  }
  __syncthreads();
  for (int from = count; from-- > 0;) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      const C sum = shared[(from * lanes + lane) * kPack + v];
      earlier[v] = from + 1 == count ? sum : earlier[v] + sum;
    }
  }
  C up_to[kPack];
#pragma unroll
  for (int v = 0; v < kPack; ++v) up_to[v] = earlier[v] + own[v];
  say(parts, kSumUpTo, up_to);
}

}  // namespace cuda_ops
