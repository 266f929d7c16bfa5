// Class 14: one row of blocks for each row, and no check whether they were launched.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_launches_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_launches_cpu(const Tensor& x) { return copied(x); }

Tensor bad_launches_cuda(const Tensor& x) {
  const int64_t cols = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  return flattened(x, [=](const Raw& problem, cudaStream_t stream) {
    return bad_launches_launch(problem, cols, stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_launches(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_launches_cpu>()
      .cuda<bad_launches_cuda>();
}
