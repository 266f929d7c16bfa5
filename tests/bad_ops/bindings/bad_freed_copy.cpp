// Class 15: frees the copy of a strided weight before the kernel that reads it is launched.
#include "weighted.h"

using namespace cuda_ops;

cudaError_t bad_freed_copy_launch(const Raw& problem, const void* weight, int64_t n,
                                  cudaStream_t stream);

namespace {

Tensor bad_freed_copy_cuda(const Tensor& x_, const Tensor& weight) {
  const Tensor x = contiguous(x_);
  const void* weights = contiguous(weight).const_data_ptr();  // the weight itself if it is
  return flattened(x, [=](const Raw& problem, cudaStream_t stream) {
    return bad_freed_copy_launch(problem, weights, x.size(x.dim() - 1), stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_freed_copy(Tensor x, Tensor weight) -> Tensor", "(n),[n]->(n)")
      .dtypes(kWide)
      .cpu<weighted_cpu>()
      .cuda<bad_freed_copy_cuda>();
}
