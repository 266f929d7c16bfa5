// Class 5: the backward walks through the incoming gradient as if it were contiguous.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_gradient_layouts_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_gradient_layouts_cpu(const Tensor& x) { return copied(x); }

Tensor bad_gradient_layouts_backward_cpu(const Tensor& grad_out, const Tensor&) {
  Tensor grad_x = empty({grad_out.sizes().begin(), grad_out.sizes().end()}, grad_out);
  visit_raw(raw(grad_x, grad_out), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = in[i];
  });
  return grad_x;
}

Tensor bad_gradient_layouts_cuda(const Tensor& x) {
  return flattened(x, bad_gradient_layouts_launch);
}

Tensor bad_gradient_layouts_backward_cuda(const Tensor& grad_out, const Tensor&) {
  Tensor grad_x = empty({grad_out.sizes().begin(), grad_out.sizes().end()}, grad_out);
  launch(grad_out, [&](cudaStream_t stream) {
    return bad_gradient_layouts_launch(raw(grad_x, grad_out), stream);
  });
  return grad_x;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient_layouts(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_layouts_cpu>()
      .cuda<bad_gradient_layouts_cuda>();
  library
      .op("bad_gradient_layouts_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kWide)
      .cpu<bad_gradient_layouts_backward_cpu>()
      .cuda<bad_gradient_layouts_backward_cuda>();
}
