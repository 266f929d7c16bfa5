// Class 7: the scale is rounded to float32, also for float64.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_scalar_cpu(const Tensor& x, double scale) {
  return elementwise_cpu([](double v, double s) { return v * s; }, x, double(float(scale)));
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_scalar(Tensor x, float scale) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_scalar_cpu>();
}
