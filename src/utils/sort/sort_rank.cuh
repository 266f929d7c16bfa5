// Places of keys by one digit of 8 bits: the work of radix sorts (sort_radix.cuh, sort_cluster.cuh)
// within a tile.
#pragma once

#include <cuda_runtime.h>

#include "ptx/warp.cuh"

namespace cuda_ops {

// Digit `shift / 8` of a key: one instruction, where a key is one word.
template <class U>
struct Digit {
  uint32_t shift, selector;
  __device__ explicit Digit(int shift) : shift(shift), selector(0x4440 + shift / 8) {}
  __device__ uint32_t operator()(U key) const {
    if constexpr (sizeof(U) <= 4) return __byte_perm(key, 0, selector);
    return uint32_t(key >> shift) & 255;
  }
};

// Returns the sum over the threads before, among the first ones of the block; all threads must
// call.
template <int kThreads, class S>
__device__ S sum_before(S value, S (&sums)[8]) {
  static_assert(kThreads % 32 == 0 && kThreads <= 256);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  S up_to = 0;
  if (warp < kThreads / 32) {
    up_to = sum_up_to_lane(value);
    if (lane == 31) sums[warp] = up_to;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32 - 1; ++w) {
    if (w < warp) up_to += sums[w];
  }
  return up_to - value;
}

// Counts the keys of the warp that come before each key of this thread, among those with the same
// digit: round r of all lanes before round r + 1. `next` has room for the warp's number of keys
// with each digit.
template <int kItems, class DigitOf>
__device__ void rank_in_warp(uint32_t (&ranks)[kItems], uint16_t (&next)[256],
                             const DigitOf& digit_of) {
  const int lane = threadIdx.x % 32;
  const uint32_t before = (1u << lane) - 1, after = ~before - (1u << lane);
  reinterpret_cast<uint4*>(next)[lane] = {};
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    const uint32_t digit = digit_of(r);
    const uint32_t same = lanes_alike<8>(digit);
    ranks[r] = next[digit] + __popc(same & before);
    __syncwarp();
    if ((same & after) == 0) next[digit] = uint16_t(ranks[r] + 1);  // the last of them
    __syncwarp();
  }
}

// Returns how many keys all warps have of two neighboring digits, the lower one's number in the
// lower half of a word.
template <int kWarps>
__device__ uint32_t add_up_warps(const uint16_t (&numbers)[kWarps][256], int pair) {
  uint32_t sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += reinterpret_cast<const uint32_t*>(numbers[w])[pair];
  return sum;
}

// Replaces the warps' numbers by the sums over the warps before, plus `first`.
template <int kWarps>
__device__ void place_warps(uint16_t (&numbers)[kWarps][256], int pair, uint32_t first) {
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    uint32_t& number = reinterpret_cast<uint32_t*>(numbers[w])[pair];
    const uint32_t of_warp = number;
    number = first;
    first += of_warp;
  }
}

}  // namespace cuda_ops
