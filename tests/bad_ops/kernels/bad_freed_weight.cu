// Class 15: its weights are in memory that was freed, and may be that of the result.
#include "raw.cuh"

using namespace cuda_ops;

namespace {

template <class T>
__global__ void scale_kernel(const T* x, const T* weight, T* out, int64_t numel, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel) out[i] = x[i] * weight[i % n];
}

}  // namespace

cudaError_t bad_freed_weight_launch(const Raw& problem, const void* weight, int64_t n,
                                    cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  return visit_raw(problem, [&](auto* x, auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
    scale_kernel<<<blocks_for(problem.numel), kThreads, 0, stream>>>(
        x, static_cast<const T*>(weight), out, problem.numel, n);
  });
}
