// The gradient through the second output takes the place of that through the first.
#include "bad.h"

using namespace cuda_ops;

namespace {

std::tuple<Tensor, Tensor> bad_gradient_outputs_cpu(const Tensor& x) {
  return {copied(x), mapped(x, [](double v) { return 3 * v; })};
}

Tensor bad_gradient_outputs_backward_cpu(const Tensor& grad_y, const Tensor& grad_z,
                                         const Tensor& x) {
  const auto f = [](double y, double z, double) { return z != 0 ? 3 * z : y; };
  return elementwise_cpu(f, grad_y, grad_z, x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient_outputs(Tensor x) -> (Tensor y, Tensor z)", "()->(),()")
      .dtypes(kWide)
      .cpu<bad_gradient_outputs_cpu>();
  library
      .op("bad_gradient_outputs_backward(Tensor grad_y, Tensor grad_z, Tensor x) -> Tensor grad_x",
          "(),(),()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_outputs_backward_cpu>();
}
