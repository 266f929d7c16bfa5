// Class 11: reads pairs, wherever the first one starts.
#include "raw.cuh"

using namespace cuda_ops;

namespace {

template <class T>
struct alignas(2 * sizeof(T)) Two {
  T a, b;
};

template <class T>
__global__ void pair_kernel(const T* x, T* out, int64_t numel) {
  const int64_t i = 2 * (int64_t(blockIdx.x) * kThreads + threadIdx.x);
  if (i + 1 < numel)
    *reinterpret_cast<Two<T>*>(out + i) = *reinterpret_cast<const Two<T>*>(x + i);
  else if (i < numel)
    out[i] = x[i];
}

}  // namespace

cudaError_t bad_alignment_launch(const Raw& problem, cudaStream_t stream) {
  return visit_raw(problem, [&](auto* x, auto* out) {
    if (problem.numel > 0)
      pair_kernel<<<blocks_for(problem.numel), kThreads, 0, stream>>>(x, out, problem.numel);
  });
}
