// Class 14: as many blocks as run at once, and no loop over what is left.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_waves_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_waves_cpu(const Tensor& x) { return copied(x); }

Tensor bad_waves_cuda(const Tensor& x) {
  const int64_t cols = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  return flattened(x, [=](const Raw& problem, cudaStream_t stream) {
    return bad_waves_launch(problem, cols, stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_waves(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_waves_cpu>()
      .cuda<bad_waves_cuda>();
}
