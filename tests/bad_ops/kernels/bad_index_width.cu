// Class 6: computes offsets in 32 bits.
#include "raw.cuh"
#include "strided.h"

using namespace cuda_ops;

namespace {

template <class T>
__global__ void narrow_kernel(Strided<1> problem) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= problem.numel) return;
  int64_t rest = i;
  int to = 0, from = 0;
  for (int d = 0; d < problem.dims; ++d) {
    const int64_t at = rest % problem.sizes[d];
    rest /= problem.sizes[d];
    to += static_cast<int>(at * problem.operands[0].strides[d]);
    from += static_cast<int>(at * problem.operands[1].strides[d]);
  }
  static_cast<T*>(problem.operands[0].data)[to] =
      static_cast<const T*>(problem.operands[1].data)[from];
}

}  // namespace

cudaError_t bad_index_width_launch(const Strided<1>& problem, cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  const unsigned blocks = blocks_for(problem.numel);
  if (problem.dtype == DType::kFloat64)
    narrow_kernel<double><<<blocks, kThreads, 0, stream>>>(problem);
  else
    narrow_kernel<float><<<blocks, kThreads, 0, stream>>>(problem);
  return cudaGetLastError();
}
