// Keeps the wrong argument where only one needs a gradient, in its plugin.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_frozen_cpu(const Tensor& a, const Tensor& b) {
  return elementwise_cpu([](double x, double y) { return x * y; }, a, b);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_frozen(Tensor a, Tensor b) -> Tensor", "(),()->()")
      .dtypes(kWide)
      .cpu<bad_frozen_cpu>();
}
