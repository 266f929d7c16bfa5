// Class 3: reads the right neighbor of the last element too.
#include "raw.cuh"

using namespace cuda_ops;

namespace {

template <class T>
__global__ void neighbor_kernel(const T* x, T* out, int64_t numel) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel) out[i] = x[i + 1] > 0 ? x[i + 1] : -x[i + 1];
}

}  // namespace

cudaError_t bad_bounds_launch(const Raw& problem, cudaStream_t stream) {
  return visit_raw(problem, [&](auto* x, auto* out) {
    if (problem.numel > 0)
      neighbor_kernel<<<blocks_for(problem.numel), kThreads, 0, stream>>>(x, out, problem.numel);
  });
}
