#pragma once
template <typename T>
__device__ T row_max(const T* x, int64_t n) {
  T most = x[0];
  for (int64_t k = 1; k < n; ++k) most = x[k] > most ? x[k] : most;
  return most;
}
