// Class 14: a thread for each element of a row, and no check of the launch.
#include "raw.cuh"

using namespace cuda_ops;

namespace {

template <class T>
__global__ void row_kernel(const T* x, T* out, int64_t cols) {
  const int64_t i = blockIdx.x * cols + threadIdx.x;
  out[i] = x[i];
}

}  // namespace

cudaError_t bad_block_launch(const Raw& problem, int64_t cols, cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  visit_raw(problem, [&](auto* x, auto* out) {
    row_kernel<<<unsigned(problem.numel / cols), unsigned(cols), 0, stream>>>(x, out, cols);
  });
  return cudaSuccess;
}
