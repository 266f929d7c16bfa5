// gelu_approx(x), the tanh approximation, its gradient and the gradient of that.
#include "elementwise.cuh"
#include "gelu.cuh"

using namespace cuda_ops;

// -----------------------------------------------------------------------------

cudaError_t gelu_approx_launch(const Strided<1>& problem, cudaStream_t stream) {
  return map_cuda<GeluApprox>(problem, stream);
}

cudaError_t gelu_approx_backward_launch(const Strided<2>& problem, cudaStream_t stream) {
  return map_cuda<GeluApproxBackward>(problem, stream);
}

cudaError_t gelu_approx_backward_backward_launch(const Strided<3, 2>& problem,
                                                 cudaStream_t stream) {
  return map_cuda<GeluApproxBackwardBackward>(problem, stream);
}
