// Scalar functions that several kernels share.
#pragma once

#include <type_traits>

namespace cuda_ops {

constexpr double kLog2E = 1.4426950408889634;

// Exact to the last bits: for results of four and eight bytes.
struct Accurate {
  // expf is within 1 ulp, and inf where it overflows.
  template <class C>
  __device__ static C exp(C x) {
    return ::exp(x);
  }

  // 1 ulp over the whole range, denominators near 2^127 included (PTX ISA,
  // rcp.approx.f32). An IEEE division costs three times as much, and __fdividef
  // returns 0 from 2^126 on, which sigmoid reaches at x = -87.3.
  __device__ static float reciprocal(float value) {
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
  }
  __device__ static double reciprocal(double value) { return 1 / value; }
};

// For results of two bytes, at a third of the instructions: relative errors of exp(x) stay below
// 2^-22 + |x| 2^-23, and results below 2^-126 become 0. A bfloat16 has 2^-9, a float16 2^-12, and
// where |x| is large the result is next to 0 or to 1.
struct Coarse {
  __device__ static float power(float x) {  // 2^x
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  __device__ static float exp(float x) { return power(x * float(kLog2E)); }
  __device__ static float reciprocal(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
  }
};

template <class T>
using MathFor = std::conditional_t<sizeof(T) == 2, Coarse, Accurate>;

template <class Math, class C>
__device__ C sigmoid(C x) {
  return Math::reciprocal(1 + Math::exp(-x));
}

// 1 / (1 + 2^x) of two numbers, coarse, by one reciprocal: 1 / a is b / (a b). Results below 2^-60
// become 0, so that the product does not overflow.
__device__ inline void sigmoids_of_powers(float (&x)[2]) {
  constexpr float kMost = 60;
  const float a = 1 + Coarse::power(fminf(x[0], kMost)), b = 1 + Coarse::power(fminf(x[1], kMost));
  const float both = Coarse::reciprocal(a * b);
  x[0] = x[0] > kMost ? 0 : both * b;
  x[1] = x[1] > kMost ? 0 : both * a;
}

// sigmoid(x), 1 - sigmoid(x) and their product, the derivative, each as exact as Math:
// for large x the difference would have lost all of them, and gradients scale what is
// left.
template <class Math, class C>
struct Sigmoid {
  C value, complement, slope;

  __device__ explicit Sigmoid(C x) {
    const C small = Math::exp(-fabs(x)), large = Math::reciprocal(1 + small);
    const C rest = small * large;
    value = x < 0 ? rest : large;
    complement = x < 0 ? large : rest;
    slope = rest * large;
  }
};

}  // namespace cuda_ops
