// kernel<T><<<...>>>(const T* x, T* out, n) for the type of the elements.
#pragma once

#include "raw.h"

namespace cuda_ops {

constexpr int kThreads = 256;

inline unsigned blocks_for(int64_t numel) {
  return static_cast<unsigned>((numel + kThreads - 1) / kThreads);
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
