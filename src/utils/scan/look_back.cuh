// Sums over the parts before one's own, in the kernel that sums each part. As in Merrill and
// Garland, Single-pass Parallel Prefix Scan with Decoupled Look-back, NVR-2016-002, each block says
// what its part sums up to as soon as it knows, and adds up what those before it say.
//
// Here parts are added in groups of 32, and groups one after the other, always in this order, so
// the bits do not depend on which blocks were faster. The last block of a group says what the group
// sums up to, which waits for no group before, and then the sum up to its end. A block waits for
// the parts before it in its group and, beyond that, for as many groups as are under way.
//
// Blocks start in the order of their index, which CUB's scan relies on too: a block waits for such
// with a lower index alone.
#pragma once

#include <cstdint>

#include "dtype.cuh"
#include "scan/scan.h"

namespace cuda_ops {

enum PartState : uint32_t { kNothing, kOwnSum, kSumUpTo };

__device__ inline uint32_t load_state(const uint32_t* at) {
  uint32_t state;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(state) : "l"(at) : "memory");
  return state;
}
__device__ inline void store_state(uint32_t* at, PartState state) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(uint32_t(state)) : "memory");
}

// What is said of the parts of `lines` lines, and of their groups. A block has a part: first come
// those at the beginning of each line, then the next. A sum is `lanes` packs.
template <class C>
struct Parts {
  uint32_t* states;        // of each part, of which the own sum alone is said
  uint32_t* group_states;  // of each group
  C* sums;                 // of each part
  C* group_sums;           // two of each group: its own, and that up to its end
  int64_t lines;
  int lanes;
};

template <class C>
__device__ Parts<C> parts_of(void* workspace, const ScanConfig& config) {
  const ScanRoom room(config, sizeof(C));
  auto* const from = static_cast<char*>(workspace);
  auto* const states = reinterpret_cast<uint32_t*>(from);
  auto* const sums = reinterpret_cast<C*>(from + room.sums);
  return {states,       states + config.blocks,           sums, sums + config.blocks * room.width,
          config.lines, config.columns ? config.lanes : 1};
}

// The first warp says a sum, one lane for each pack.
template <class C, int kPack>
__device__ void say(uint32_t* at, PartState state, C* sums, int lanes, const C (&sum)[kPack]) {
  const int lane = int(threadIdx.x);
  if (lane >= 32) return;
  if (lane < lanes) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) sums[lane * kPack + v] = sum[v];
  }
  __syncwarp();
  if (lane == 0) store_state(at, state);
}

// Returns how many groups back the first sum up to an end is, once there is one and all groups
// between have said their own. Called by a whole warp, for the group at `state`; at most as many as
// a warp has lanes are looked at.
__device__ inline int nearest_sum(const uint32_t* state, int64_t lines, int64_t groups) {
  const int back = int(threadIdx.x) % 32 + 1;
  for (;;) {
    const uint32_t said = back <= groups ? load_state(state - back * lines) : uint32_t(kNothing);
    const unsigned up_to = __ballot_sync(~0u, said == kSumUpTo);
    const unsigned nothing = __ballot_sync(~0u, said == kNothing);
    const int found = up_to == 0 ? 32 : __ffs(int(up_to)) - 1;
    const int missing = nothing == 0 ? 32 : __ffs(int(nothing)) - 1;
    if (found < missing) return found + 1;
  }
}

// Adds up `count` sums that others have said, one after the other, number k at `sum_of(k)`. All
// threads call, and each gets the sum of its pack.
template <class C, int kPack, int kWidth, class SumOf>
__device__ void add_up(int count, int lanes, SumOf sum_of, C (&shared)[kPartsOfGroup * kWidth],
                       C (&sum)[kPack]) {
  const int width = lanes * kPack;
  for (int i = int(threadIdx.x); i < count * width; i += int(blockDim.x)) {
    shared[i] = __ldcg(sum_of(i / width) + i % width);
  }
  __syncthreads();
  const int at = int(threadIdx.x) % lanes * kPack;
#pragma unroll
  for (int v = 0; v < kPack; ++v) sum[v] = shared[at + v];
#pragma unroll 4
  for (int k = 1; k < count; ++k) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) sum[v] += shared[k * width + at + v];
  }
}

// Says what part `part` of a line sums up to, and puts the sum of those before into `earlier`. All
// threads call; `own` is that of the thread's pack, threadIdx.x % lanes. kWidth is the most numbers
// that a sum has.
template <int kWidth, class C, int kPack>
__device__ void look_back(const Parts<C>& parts, int64_t part, const C (&own)[kPack],
                          C (&earlier)[kPack]) {
  __shared__ C shared[kPartsOfGroup * kWidth];
  __shared__ int distance;
  const int lanes = parts.lanes, width = lanes * kPack, lane = int(threadIdx.x) % 32;
  const int64_t lines = parts.lines, line = blockIdx.x % lines, group = part / kPartsOfGroup;
  const int place = int(part % kPartsOfGroup);  // in the group
  const bool first_warp = threadIdx.x < 32;
  say(parts.states + blockIdx.x, kOwnSum, parts.sums + blockIdx.x * width, lanes, own);

#pragma unroll
  for (int v = 0; v < kPack; ++v) earlier[v] = 0;
  if (place > 0) {
    if (first_warp && lane < place) {
      while (load_state(parts.states + blockIdx.x - (place - lane) * lines) == kNothing) {
      }
    }
    __syncthreads();
    const auto sum_of = [&](int k) {
      return parts.sums + (blockIdx.x - (place - k) * lines) * width;
    };
    add_up<C, kPack, kWidth>(place, lanes, sum_of, shared, earlier);
  }

  const bool is_last = place == kPartsOfGroup - 1;
  const int64_t mine = group * lines + line;  // of the groups
  C sum[kPack];
#pragma unroll
  for (int v = 0; v < kPack; ++v) sum[v] = earlier[v] + own[v];
  const auto say_group = [&](PartState state) {
    C* const sums = parts.group_sums + (mine * 2 + (state == kSumUpTo)) * width;
    say(parts.group_states + mine, state, sums, lanes, sum);
  };
  if (is_last) say_group(group == 0 ? kSumUpTo : kOwnSum);
  if (group == 0) return;

  if (first_warp) {
    const int found = nearest_sum(parts.group_states + mine, lines, group);
    if (lane == 0) distance = found;
  }
  __syncthreads();
  const int count = distance;
  const auto sum_of = [&](int k) {
    return parts.group_sums + ((mine - (count - k) * lines) * 2 + (k == 0)) * width;
  };
  C up_to[kPack];  // the groups before
  add_up<C, kPack, kWidth>(count, lanes, sum_of, shared, up_to);
#pragma unroll
  for (int v = 0; v < kPack; ++v) {
    earlier[v] = up_to[v] + earlier[v];
    sum[v] = up_to[v] + sum[v];
  }
  if (is_last) say_group(kSumUpTo);
}

}  // namespace cuda_ops
