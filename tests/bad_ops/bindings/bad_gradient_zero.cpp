// Class 7: divides by what may be 0, in the gradient alone.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_gradient_zero_cpu(const Tensor& x) {
  return elementwise_cpu([](double v) { return v * v; }, x);
}

Tensor bad_gradient_zero_backward_cpu(const Tensor& grad_out, const Tensor& x) {
  return elementwise_cpu([](double g, double v) { return g * 2 * (v * v) / v; }, grad_out, x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient_zero(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_zero_cpu>();
  library.op("bad_gradient_zero_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_zero_backward_cpu>();
}
