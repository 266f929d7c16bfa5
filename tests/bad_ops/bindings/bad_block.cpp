// Class 14: a thread for each element of a row, and no check of the launch.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_block_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_block_cpu(const Tensor& x) { return copied(x); }

Tensor bad_block_cuda(const Tensor& x) {
  const int64_t cols = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  return flattened(x, [=](const Raw& problem, cudaStream_t stream) {
    return bad_block_launch(problem, cols, stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_block(Tensor x) -> Tensor", "(n)->(n)")
      .dtypes(kWide)
      .cpu<bad_block_cpu>()
      .cuda<bad_block_cuda>();
}
