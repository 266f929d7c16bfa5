// Its public function, in the plugin, has another default than the schema.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_default_cpu(const Tensor& x, double scale) {
  return elementwise_cpu([](double v, double s) { return v * s; }, x, scale);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_default(Tensor x, float scale=1.0) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_default_cpu>();
}
