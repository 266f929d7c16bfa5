// Class 2: every thread writes the same shared word; which one is last is left to chance.
#include "raw.cuh"

using namespace cuda_ops;

namespace {

template <class T>
__global__ void race_kernel(const T* x, T* out, int64_t numel) {
  __shared__ T last;
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel) last = x[i];
  __syncthreads();
  if (i < numel) out[i] = last;
}

}  // namespace

cudaError_t bad_races_launch(const Raw& problem, cudaStream_t stream) {
  return visit_raw(problem, [&](auto* x, auto* out) {
    if (problem.numel > 0)
      race_kernel<<<blocks_for(problem.numel), kThreads, 0, stream>>>(x, out, problem.numel);
  });
}
