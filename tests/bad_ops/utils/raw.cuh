// kernel<T><<<...>>>(const T* x, T* out, n) for the type of the elements.
#pragma once

#include "raw.h"

namespace cuda_ops {

constexpr int kThreads = 256;

inline unsigned blocks_for(int64_t numel) {
  return static_cast<unsigned>((numel + kThreads - 1) / kThreads);
}

// What most of them launch: right for contiguous memory.
template <class T>
__global__ void copy_kernel(const T* x, T* out, int64_t numel) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel) out[i] = x[i];
}

template <class F>
cudaError_t visit_raw(const Raw& problem, F f) {
  if (problem.dtype == DType::kFloat64)
    f(static_cast<const double*>(problem.x), static_cast<double*>(problem.out));
  else
    f(static_cast<const float*>(problem.x), static_cast<float*>(problem.out));
  return cudaGetLastError();
}

}  // namespace cuda_ops
