// Class 3: each block leaves the first of its numbers in a workspace, and the last has no place.
#include "raw.cuh"

using namespace cuda_ops;

namespace {

template <class T>
__global__ void first_kernel(const T* x, double* parts) {
  parts[blockIdx.x] = double(x[int64_t(blockIdx.x) * kThreads]);
}

}  // namespace

cudaError_t bad_workspace_launch(const Raw& problem, double* parts, cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  return visit_raw(problem, [&](auto* x, auto* out) {
    const unsigned blocks = blocks_for(problem.numel);
    if (parts != nullptr) first_kernel<<<blocks, 1, 0, stream>>>(x, parts);
    copy_kernel<<<blocks, kThreads, 0, stream>>>(x, out, problem.numel);
  });
}
