// silu(x) = x * sigmoid(x), its gradient and the gradient of that. Two bytes of
// traffic per byte of x forward, three backward; the arithmetic must stay below
// that, which on an H200 leaves about 28 instructions per bfloat16 element.
#include "elementwise.cuh"
#include "math.cuh"

using namespace cuda_ops;

namespace {

template <class Math>
struct Silu {
  template <class C>
  __device__ C operator()(C x) const {
    return x * sigmoid<Math>(x);
  }
};

template <class Math>
struct SiluBackward {
  template <class C>
  __device__ C operator()(C grad_out, C x) const {
    const C s = sigmoid<Math>(x);
    return grad_out * s * (1 + x * (1 - s));
  }
};

template <class Math>
struct SiluBackwardBackward {
  template <class C>
  __device__ Results<C, 2> operator()(C grad_grad_x, C grad_out, C x) const {
    const C s = sigmoid<Math>(x);
    const C first = s * (1 + x * (1 - s));
    const C second = s * (1 - s) * (2 + x * (1 - 2 * s));
    return {grad_grad_x * first, grad_grad_x * (grad_out * second)};
  }
};

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t silu_launch(const Strided<1>& problem, cudaStream_t stream) {
  return map_cuda<Silu>(problem, stream);
}

cudaError_t silu_backward_launch(const Strided<2>& problem, cudaStream_t stream) {
  return map_cuda<SiluBackward>(problem, stream);
}

cudaError_t silu_backward_backward_launch(const Strided<3, 2>& problem, cudaStream_t stream) {
  return map_cuda<SiluBackwardBackward>(problem, stream);
}
