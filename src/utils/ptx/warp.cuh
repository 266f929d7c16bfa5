// Functions that the 32 lanes of a warp compute together; all of them must call.
#pragma once

#include <cstdint>

namespace cuda_ops {

// Tells the compiler that all lanes have this value. It then keeps the value, and others computed
// from it, in uniform registers: wgmma's descriptors are not copied there for each instruction.
__device__ inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Sums over `lanes` neighboring lanes, a power of two; all get the sum.
template <class C>
__device__ C lanes_total(C value, int lanes) {
#pragma unroll
  for (int lane = lanes / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  return value;
}

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

// Returns the lanes whose `bit` is 0 if this one's is, else those whose bit is not. In PTX it takes
// two instructions, and `bit` is tested together with others of its word.
__device__ inline uint32_t lanes_with_bit(uint32_t bit) {
  uint32_t lanes;
  asm volatile(
      "{\n.reg .pred one;\n"
      "setp.ne.u32 one, %1, 0;\n"
      "vote.sync.ballot.b32 %0, one, 0xffffffff;\n"
      "@!one not.b32 %0, %0;\n}"
      : "=r"(lanes)
      : "r"(bit));
  return lanes;
}

// Returns the lanes that have the same value, of so many bits. It votes: __match_any_sync takes
// longer the more values there are among the lanes, 0.2 us for those of 128 experts
// (H200, 2026-11-21).
template <int kMostBits>
__device__ uint32_t lanes_alike(uint32_t value, int bits = kMostBits) {
  uint32_t alike = ~0u;
#pragma unroll
  for (int b = 0; b < kMostBits; b += 2) {
    if (b >= bits) break;
    const uint32_t one = lanes_with_bit(value & 1u << b);
    const uint32_t other = b + 1 < kMostBits ? lanes_with_bit(value & 2u << b) : ~0u;
    // alike & one & other, which the compiler would take two instructions for.
    asm("lop3.b32 %0, %0, %1, %2, %3;" : "+r"(alike) : "r"(one), "r"(other), "n"(0x80));
  }
  return alike;
}

}  // namespace cuda_ops
