// gelu_approx(x), the tanh approximation, its gradient and the gradient of that.
// 0.5 * (1 + tanh(u)) is sigmoid(2u), so one exponential serves: with
// v = sqrt(8 / pi) * (x + 0.044715 x^3) the function is x * sigmoid(v).
#include "elementwise.cuh"
#include "math.cuh"

using namespace cuda_ops;

namespace {

constexpr double kScale = 1.5957691216057308;  // sqrt(8 / pi)
constexpr double kCubic = 0.044715;

template <class C>
struct Inner {
  C value, first, second;  // v, dv/dx, d2v/dx2

  __device__ explicit Inner(C x)
      : value(C(kScale) * x * (1 + C(kCubic) * x * x)),
        first(C(kScale) * (1 + C(3 * kCubic) * x * x)),
        second(C(6 * kScale * kCubic) * x) {}
};

// slope * rest, and 0 where the sigmoid is flat however large the rest grows.
template <class C>
__device__ C flattened(C slope, C rest) {
  return slope == 0 ? C(0) : slope * rest;
}

struct GeluApprox {
  template <class C>
  __device__ C operator()(C x) const {
    return x * sigmoid(Inner<C>(x).value);
  }
};

struct GeluApproxBackward {
  template <class C>
  __device__ C operator()(C grad_out, C x) const {
    const Inner<C> v(x);
    const Sigmoid<C> s(v.value);
    return grad_out * (s.value + flattened(s.value * s.complement, x * v.first));
  }
};

struct GeluApproxBackwardBackward {
  template <class C>
  __device__ Results<C, 2> operator()(C grad_grad_x, C grad_out, C x) const {
    const Inner<C> v(x);
    const Sigmoid<C> s(v.value);
    const C slope = s.value * s.complement;
    const C first = s.value + flattened(slope, x * v.first);
    const C bend = v.second + (s.complement - s.value) * v.first * v.first;
    const C second = flattened(slope, 2 * v.first + x * bend);
    return {grad_grad_x * first, grad_grad_x * grad_out * second};
  }
};

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t gelu_approx_launch(const Strided<1>& problem, cudaStream_t stream) {
  return map_cuda(problem, stream, GeluApprox{});
}

cudaError_t gelu_approx_backward_launch(const Strided<2>& problem, cudaStream_t stream) {
  return map_cuda(problem, stream, GeluApproxBackward{});
}

cudaError_t gelu_approx_backward_backward_launch(const Strided<3, 2>& problem,
                                                 cudaStream_t stream) {
  return map_cuda(problem, stream, GeluApproxBackwardBackward{});
}
