// Its gradient asks for an argument that the call may leave out.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_left_out_cpu(const Tensor& x, double scale) {
  return elementwise_cpu([](double v, double s) { return v * s; }, x, scale);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_left_out(Tensor x, float scale=2.0) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_left_out_cpu>();
}
