// Class 8: launches on the default stream.
#include "raw.cuh"

using namespace cuda_ops;

cudaError_t bad_streams_launch(const Raw& problem, cudaStream_t stream) {
  return visit_raw(problem, [&](auto* x, auto* out) {
    if (problem.numel > 0)
      copy_kernel<<<blocks_for(problem.numel), kThreads, 0, nullptr>>>(x, out, problem.numel);
  });
}
