// Layer norm of each row, and its gradient: bound by memory, x in and out, grad_out with it.
#include "norm/norm.cuh"

using namespace cuda_ops;

cudaError_t layer_norm_launch(const Norm& problem, cudaStream_t stream) {
  return launch_norm<NormKind::kLayer>(problem, stream);
}

int64_t layer_norm_backward_partials(const NormGradient& problem) {
  return norm_partials(problem, current_device());
}

cudaError_t layer_norm_backward_launch(const NormGradient& problem, cudaStream_t stream) {
  return launch_norm_gradient<NormKind::kLayer>(problem, stream);
}
