// gelu in its tanh approximation and its derivatives, as functors of one element.
// 0.5 * (1 + tanh(u)) is sigmoid(2u), so one exponential serves: with
// v = sqrt(8 / pi) * (x + 0.044715 x^3) the function is x * sigmoid(v).
#pragma once

#include "math.cuh"
#include "strided.h"

namespace cuda_ops {

constexpr double kGeluScale = 1.5957691216057308;  // sqrt(8 / pi)
constexpr double kGeluCubic = 0.044715;

template <class C>
struct GeluInner {
  C value, first, second;  // v, dv/dx, d2v/dx2

  __device__ explicit GeluInner(C x)
      : value(x * (C(kGeluScale) + C(kGeluScale * kGeluCubic) * (x * x))),
        first(C(kGeluScale) + C(3 * kGeluScale * kGeluCubic) * (x * x)),
        second(C(6 * kGeluScale * kGeluCubic) * x) {}
};

// Returns slope * rest, and 0 where the sigmoid is flat, however large the rest grows.
template <class C>
__device__ C flattened(C slope, C rest) {
  return slope == 0 ? C(0) : slope * rest;
}

template <class Math>
struct GeluApprox {
  template <class C>
  __device__ C operator()(C x) const {
    return x * sigmoid<Math>(GeluInner<C>(x).value);
  }
};

// The same for two elements, where exponentials and reciprocals take the time.
template <class Math, class C>
__device__ void gelu_approx(C (&x)[2]) {
  if constexpr (std::is_same_v<Math, Coarse>) {
    constexpr float kScale = float(-kLog2E * kGeluScale), kCubic = float(kGeluCubic) * kScale;
    float values[2] = {x[0] * (kScale + kCubic * (x[0] * x[0])),
                       x[1] * (kScale + kCubic * (x[1] * x[1]))};
    sigmoids_of_powers(values);
    x[0] *= values[0];
    x[1] *= values[1];
  } else {
    x[0] = GeluApprox<Math>{}(x[0]);
    x[1] = GeluApprox<Math>{}(x[1]);
  }
}

template <class Math>
struct GeluApproxBackward {
  static constexpr bool kLong = true;
  template <class C>
  __device__ C operator()(C grad_out, C x) const {
    const GeluInner<C> v(x);
    const Sigmoid<Math, C> s(v.value);
    return grad_out * (s.value + flattened(s.slope, x * v.first));
  }
};

template <class Math>
struct GeluApproxBackwardBackward {
  static constexpr bool kLong = true;
  template <class C>
  __device__ Results<C, 2> operator()(C grad_grad_x, C grad_out, C x) const {
    const GeluInner<C> v(x);
    const Sigmoid<Math, C> s(v.value);
    const C first = s.value + flattened(s.slope, x * v.first);
    const C bend = v.second + (s.complement - s.value) * v.first * v.first;
    const C second = flattened(s.slope, 2 * v.first + x * bend);
    return {grad_grad_x * first, grad_grad_x * (grad_out * second)};
  }
};

}  // namespace cuda_ops
