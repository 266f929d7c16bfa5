// Class 8: copies without a stream.
#include "raw.cuh"

using namespace cuda_ops;

cudaError_t bad_copies_launch(const Raw& problem, int64_t, cudaStream_t) {
  const size_t bytes = problem.numel * (problem.dtype == DType::kFloat64 ? 8 : 4);
  return cudaMemcpyAsync(problem.out, problem.x, bytes, cudaMemcpyDeviceToDevice);
}
