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

// sigmoid(x) and 1 - sigmoid(x), each to its last bits: for large x the
// difference would have lost all of them, and gradients scale what is left.
template <class C>
struct Sigmoid {
  C value, complement;

  __device__ explicit Sigmoid(C x) {
    const C small = exp(-fabs(x)), large = reciprocal(1 + small);
    value = x < 0 ? small * large : large;
    complement = x < 0 ? large : small * large;
  }
};

}  // namespace cuda_ops
