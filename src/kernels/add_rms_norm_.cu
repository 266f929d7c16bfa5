// residual += x and the RMS norm of the sum in one pass: two tensors in and two out, where two
// operators would move five.
#include "norm/norm.cuh"

using namespace cuda_ops;

cudaError_t add_rms_norm_launch(const Norm& problem, cudaStream_t stream) {
  return launch_norm<NormKind::kAddRms>(problem, stream);
}
