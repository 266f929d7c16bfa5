// Class 15: of a strided gradient the backward makes a copy, and frees it before it is read.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_gradient_temporary_cpu(const Tensor& x) { return copied(x); }

Tensor bad_gradient_temporary_backward_cpu(const Tensor& grad_out, const Tensor&) {
  const void* values = contiguous(grad_out).const_data_ptr();
  Tensor grad_x = empty({grad_out.sizes().begin(), grad_out.sizes().end()}, grad_out);
  visit_raw({dtype_of(grad_out), values, grad_x.mutable_data_ptr(), grad_out.numel()},
            [](auto* in, auto* result, int64_t numel) {
              for (int64_t i = 0; i < numel; ++i) result[i] = in[i];
            });
  return grad_x;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient_temporary(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_temporary_cpu>();
  library
      .op("bad_gradient_temporary_backward(Tensor grad_out, Tensor x) -> Tensor grad_x",
          "(),()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_temporary_backward_cpu>();
}
