// Class 8: a stream of its own that waits, and is not waited for.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_join_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_join_cpu(const Tensor& x) { return copied(x); }

Tensor bad_join_cuda(const Tensor& x) {
  const int64_t cols = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  return flattened(x, [=](const Raw& problem, cudaStream_t stream) {
    return bad_join_launch(problem, cols, stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_join(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_join_cpu>()
      .cuda<bad_join_cuda>();
}
