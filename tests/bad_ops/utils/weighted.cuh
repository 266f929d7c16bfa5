// x times a weight for each element of a row, on a GPU.
#pragma once

#include "raw.cuh"

namespace cuda_ops {

template <class T>
__global__ void weighted_kernel(const T* x, const T* weight, T* out, int64_t numel, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel) out[i] = x[i] * weight[i % n];
}

inline cudaError_t weighted(const Raw& problem, const void* weight, int64_t n,
                            cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  return visit_raw(problem, [&](auto* x, auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
    weighted_kernel<<<blocks_for(problem.numel), kThreads, 0, stream>>>(
        x, static_cast<const T*>(weight), out, problem.numel, n);
  });
}

}  // namespace cuda_ops
