// fused_relu_scale(x, alpha) = relu(x) * alpha, and its gradient.
#include "binding.h"

using namespace cuda_ops;

cudaError_t fused_relu_scale_launch(const Strided<1>& problem, double alpha, cudaStream_t stream);
cudaError_t fused_relu_scale_backward_launch(const Strided<2>& problem, double alpha,
                                             cudaStream_t stream);

namespace {

// As kernels round it: to float64 for float64, else to float32.
double rounded(double alpha, const Tensor& x) {
  return dtype_of(x) == DType::kFloat64 ? alpha : double(float(alpha));
}

Tensor fused_relu_scale_cpu(const Tensor& x, double alpha) {
  const auto f = [](double v, double scale) { return (v < 0 ? 0 : v) * scale; };
  return elementwise_cpu(f, x, rounded(alpha, x));
}

Tensor fused_relu_scale_cuda(const Tensor& x, double alpha) {
  return elementwise_cuda(fused_relu_scale_launch, x, alpha);
}

Tensor fused_relu_scale_backward_cpu(const Tensor& grad_out, const Tensor& x, double alpha) {
  const auto f = [](double g, double v, double scale) { return v <= 0 ? 0 : g * scale; };
  return elementwise_cpu(f, grad_out, x, rounded(alpha, x));
}

Tensor fused_relu_scale_backward_cuda(const Tensor& grad_out, const Tensor& x, double alpha) {
  return elementwise_cuda(fused_relu_scale_backward_launch, grad_out, x, alpha);
}

}  // namespace

CUDA_OPS(library) {
  library.op("fused_relu_scale(Tensor x, float alpha) -> Tensor", "()->()")
      .dtypes(kFloating)
      .doc(R"(Rectifies x and scales it: relu(x) * alpha, in one pass.

Shapes: x (...); the result has the shape of x, and its layout where x is dense.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The arithmetic runs in
float64 for float64 and in float32 for the others; alpha is rounded to that type.
Errors: RuntimeError for any other dtype.
Formula: relu as in torch.nn.functional.relu; NaN stays NaN.

Example:
>>> cuda_ops.fused_relu_scale(torch.tensor([-1.0, 3.0]), 2.0)
tensor([0., 6.]))")
      .cpu<fused_relu_scale_cpu>()
      .cuda<fused_relu_scale_cuda>();
  library
      .op("fused_relu_scale_backward(Tensor grad_out, Tensor x, float alpha) -> Tensor grad_x",
          "(),()->()")
      .dtypes(kFloating)
      .doc(R"(Gradient of fused_relu_scale: 0 where x <= 0, else grad_out * alpha.

Shapes: grad_out and x (...), broadcast; grad_x has the broadcast shape.
Dtypes: float64, float32, float16 or bfloat16, the same for both.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not broadcast.
Formula: d relu(x) / dx is 1 for x > 0 and 0 otherwise, torch's choice at 0.)")
      .cpu<fused_relu_scale_backward_cpu>()
      .cuda<fused_relu_scale_backward_cuda>();
}
