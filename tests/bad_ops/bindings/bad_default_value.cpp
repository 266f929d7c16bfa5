// Its schema has another default than the formula that it stands for.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_default_value_cpu(const Tensor& x, double by) {
  return elementwise_cpu([](double v, double b) { return v + b; }, x, by);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_default_value(Tensor x, float by=1e-6) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_default_value_cpu>();
}
