// Two numbers of eight bits at once, by the instruction that sm_89 and later have for it; the twin
// of narrow.h for the `.cu` side.
#pragma once

#include "narrow.h"

namespace cuda_ops {

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
