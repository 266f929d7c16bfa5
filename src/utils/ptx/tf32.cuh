// Floats as sums of two tf32, which have 10 bits behind the point and which tensor cores multiply
// in place of float32. Needs sm_80.
#pragma once

#include <cstdint>

namespace cuda_ops {

__device__ inline uint32_t to_tf32(uint32_t word) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
  return rounded;
}

// high + low is the float, apart from a rounding of 2^-22 of it; of a value that is not finite,
// high alone.
__device__ inline void split_tf32(uint32_t word, uint32_t& high, uint32_t& low) {
  high = to_tf32(word);
  // The largest floats would round to infinity: their bits beyond 10 are cut off.
  const bool huge = fabsf(__uint_as_float(high)) == INFINITY;
  if (huge) high = word & 0xffffe000u;
  const float rest = __uint_as_float(word) - __uint_as_float(high);
  low = huge ? __float_as_uint(rest) & 0xffffe000u : to_tf32(__float_as_uint(rest));
  if (!(fabsf(rest) < INFINITY)) low = 0;
}

// An infinity or NaN multiplies in high * high alone: times a low of 0 it would make
// NaN of every infinity.
__device__ inline uint32_t finite(uint32_t high) {
  return (high & 0x7f800000u) == 0x7f800000u ? 0 : high;
}

}  // namespace cuda_ops
