// Scalar functions that several kernels share.
#pragma once

namespace cuda_ops {

// 1 ulp over the whole range, denominators near 2^127 included (PTX ISA,
// rcp.approx.f32). An IEEE division costs three times as much, and __fdividef
// returns 0 from 2^126 on, which sigmoid reaches at x = -87.3.
__device__ inline float reciprocal(float value) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
__device__ inline double reciprocal(double value) { return 1 / value; }

template <class C>
__device__ C sigmoid(C x) {
  return reciprocal(1 + exp(-x));  // exp(float) is expf: 1 ulp, and inf where it overflows
}

}  // namespace cuda_ops
