// A wrong gradient: half of what it should be.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_gradient_cpu(const Tensor& x) { return copied(x); }

Tensor bad_gradient_backward_cpu(const Tensor& grad_out, const Tensor& x) {
  Tensor grad_x = empty_elementwise(grad_out, x);
  map_cpu(strided(grad_x, grad_out, x), [](double g, double) { return g / 2; });
  return grad_x;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_gradient_cpu>();
  library.op("bad_gradient_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_backward_cpu>();
}
