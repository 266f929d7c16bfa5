// Class 14: a row in shared memory, however long, and no check of the launch.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_shared_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_shared_cpu(const Tensor& x) { return copied(x); }

Tensor bad_shared_cuda(const Tensor& x) {
  const int64_t cols = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  return flattened(x, [=](const Raw& problem, cudaStream_t stream) {
    return bad_shared_launch(problem, cols, stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_shared(Tensor x) -> Tensor", "(n)->(n)")
      .dtypes(kWide)
      .cpu<bad_shared_cpu>()
      .cuda<bad_shared_cuda>();
}
