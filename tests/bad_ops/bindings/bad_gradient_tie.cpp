// Class 7: gives the whole gradient to each of two equal numbers.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_gradient_tie_cpu(const Tensor& a, const Tensor& b) {
  return elementwise_cpu([](double x, double y) { return x > y || x != x ? x : y; }, a, b);
}

std::tuple<Tensor, Tensor> bad_gradient_tie_backward_cpu(const Tensor& grad_out, const Tensor& a,
                                                         const Tensor& b) {
  const auto share = [](double g, double x, double y) { return x >= y ? g : 0; };
  return {elementwise_cpu(share, grad_out, a, b), elementwise_cpu(share, grad_out, b, a)};
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient_tie(Tensor a, Tensor b) -> Tensor", "(),()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_tie_cpu>();
  library
      .op("bad_gradient_tie_backward(Tensor grad_out, Tensor a, Tensor b) -> (Tensor grad_a, "
          "Tensor grad_b)",
          "(),(),()->(),()")
      .dtypes(kWide)
      .cpu<bad_gradient_tie_backward_cpu>();
}
