// What the 32 lanes of a warp find out together; all of them must call.
#pragma once

#include <cstdint>

namespace cuda_ops {

// The sum over this lane and those before it.
template <class T>
__device__ T sum_up_to_lane(T value) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, unsigned(step));
    if (lane >= step) value += other;
  }
  return value;
}

// The lanes that have the same value, of so many bits. Votes: __match_any_sync takes
// longer the more values there are among the lanes, 0.2 us for those of 128 experts
// (H200, 2026-11-21).
template <int kMostBits>
__device__ uint32_t lanes_alike(uint32_t value, int bits = kMostBits) {
  uint32_t alike = ~0u;
#pragma unroll
  for (int b = 0; b < kMostBits; ++b) {
    if (b >= bits) break;
    const bool one = (value >> b & 1) != 0;
    const uint32_t ones = __ballot_sync(~0u, one);
    alike &= one ? ones : ~ones;
  }
  return alike;
}

}  // namespace cuda_ops
