// Class 5: the backward walks through the input that the forward kept as if it were contiguous.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_gradient_inputs_cpu(const Tensor& x) {
  return mapped(x, [](double v) { return v * v; });
}

Tensor bad_gradient_inputs_backward_cpu(const Tensor& grad_out, const Tensor& x) {
  Tensor grad_x = empty({x.sizes().begin(), x.sizes().end()}, x);
  visit_raw(raw(grad_x, x), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = 2 * in[i];
  });
  const auto f = [](double g, double twice) { return g * twice; };
  return elementwise_cpu(f, grad_out, grad_x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient_inputs(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_inputs_cpu>();
  library
      .op("bad_gradient_inputs_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_inputs_backward_cpu>();
}
