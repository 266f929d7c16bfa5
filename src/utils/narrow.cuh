// Numbers over a scale, and two of eight bits at once, by the instruction that sm_89 and later have
// for it; the twin of narrow.h for the `.cu` side.
#pragma once

#include "narrow.h"

namespace cuda_ops {

// x / by for many x, rounded as IEEE division rounds, without its range checks and its reciprocal
// for each x: that is taken once, and two remainders mend what is left (Markstein, 1990).
struct Quotient {
  float by, inverse;
  // Elsewhere the remainders may underflow while the quotient does not become 0.
  bool is_ordinary;

  __device__ explicit Quotient(float by)
      : by(by), inverse(1 / by), is_ordinary(fabsf(by) > 0x1p-60f && fabsf(by) < 0x1p60f) {}

  __device__ float operator()(float x) const {
    if (!is_ordinary) return __fdiv_rn(x, by);
    const float first = x * inverse;
    float quotient = first;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      quotient = __fmaf_rn(__fmaf_rn(-quotient, by, x), inverse, quotient);
    }
    // An infinity has no remainder; and -0 stays.
    return fabsf(first) < INFINITY ? copysignf(quotient, first) : first;
  }
};

// The first in the lower half of the result. What is too large becomes the largest number, as by
// Float8E4M3::saturated.
__device__ inline uint16_t saturated(float first, float second, Float8E4M3) {
#if __CUDA_ARCH__ >= 890
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
#else
  return uint16_t(Float8E4M3::saturated(first).bits | Float8E4M3::saturated(second).bits << 8);
#endif
}
__device__ inline uint16_t saturated(float first, float second, Float8E5M2) {
#if __CUDA_ARCH__ >= 890
  uint16_t both;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
#else
  return uint16_t(Float8E5M2::saturated(first).bits | Float8E5M2::saturated(second).bits << 8);
#endif
}

}  // namespace cuda_ops
