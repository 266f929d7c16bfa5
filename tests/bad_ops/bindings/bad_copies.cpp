// Class 8: copies without a stream.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_copies_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_copies_cpu(const Tensor& x) { return copied(x); }

Tensor bad_copies_cuda(const Tensor& x) {
  const int64_t cols = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  return flattened(x, [=](const Raw& problem, cudaStream_t stream) {
    return bad_copies_launch(problem, cols, stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_copies(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_copies_cpu>()
      .cuda<bad_copies_cuda>();
}
