// Class 15: the last of an odd number of elements is never written.
#include "raw.cuh"

using namespace cuda_ops;

namespace {

template <class T>
__global__ void copy_pairs_kernel(const T* x, T* out, int64_t numel) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel - numel % 2) out[i] = x[i];
}

}  // namespace

cudaError_t bad_unwritten_launch(const Raw& problem, cudaStream_t stream) {
  return visit_raw(problem, [&](auto* x, auto* out) {
    if (problem.numel > 0)
      copy_pairs_kernel<<<blocks_for(problem.numel), kThreads, 0, stream>>>(x, out, problem.numel);
  });
}
