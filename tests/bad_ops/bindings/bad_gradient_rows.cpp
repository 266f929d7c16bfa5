// Class 5: the backward takes a gradient that is alike along its last dim for one that is alike
// everywhere, as that of a plain sum is.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_gradient_rows_cpu(const Tensor& x) { return copied(x); }

Tensor bad_gradient_rows_backward_cpu(const Tensor& grad_out, const Tensor&) {
  const int64_t last = grad_out.dim() - 1;
  if (last < 0 || grad_out.numel() == 0 || grad_out.stride(last) != 0) return copied(grad_out);
  Tensor grad_x = empty({grad_out.sizes().begin(), grad_out.sizes().end()}, grad_out);
  visit_raw(raw(grad_x, grad_out), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = in[0];
  });
  return grad_x;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient_rows(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_rows_cpu>();
  library.op("bad_gradient_rows_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_rows_backward_cpu>();
}
