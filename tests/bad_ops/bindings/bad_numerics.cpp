// Class 7: a maximum with 0 that loses NaN.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_numerics_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_numerics_cpu(const Tensor& x) {
  return mapped(x, [](double v) { return v > 0 ? v : 0; });
}

Tensor bad_numerics_cuda(const Tensor& x) { return flattened(x, bad_numerics_launch); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_numerics(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_numerics_cpu>()
      .cuda<bad_numerics_cuda>();
}
