// A wrong derivative in forward mode: twice what it should be.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_jvp_cpu(const Tensor& x) { return copied(x); }

Tensor bad_jvp_backward_cpu(const Tensor& grad_out) { return copied(grad_out); }

Tensor bad_jvp_jvp_cpu(const Tensor& tangent_x) {
  return elementwise_cpu([](double t) { return 2 * t; }, tangent_x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_jvp(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_jvp_cpu>();
  library.op("bad_jvp_backward(Tensor grad_out) -> Tensor grad_x", "()->()")
      .dtypes(kWide)
      .cpu<bad_jvp_backward_cpu>();
  library.op("bad_jvp_jvp(Tensor tangent_x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_jvp_jvp_cpu>();
}
