// Class 7: the gradient goes by the sign of the result, which is that of x only for slopes above 0.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_scalar_gradient_cpu(const Tensor& x, double slope) {
  return elementwise_cpu([](double v, double a) { return v > 0 ? v : a * v; }, x, slope);
}

Tensor bad_scalar_gradient_backward_cpu(const Tensor& grad_out, const Tensor& out, double slope) {
  return elementwise_cpu([](double g, double y, double a) { return y > 0 ? g : a * g; }, grad_out,
                         out, slope);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_scalar_gradient(Tensor x, float slope=0.25) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_scalar_gradient_cpu>();
  library
      .op("bad_scalar_gradient_backward(Tensor grad_out, Tensor out, float slope) -> Tensor grad_x",
          "(),()->()")
      .dtypes(kWide)
      .cpu<bad_scalar_gradient_backward_cpu>();
}
