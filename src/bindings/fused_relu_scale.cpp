// fused_relu_scale(x, alpha) = relu(x) * alpha, and its gradient.
#include "binding.h"

using namespace cuda_ops;

cudaError_t fused_relu_scale_launch(const Strided<1>& problem, double alpha, cudaStream_t stream);
cudaError_t fused_relu_scale_backward_launch(const Strided<2>& problem, double alpha,
                                             cudaStream_t stream);

namespace {

// As the kernels have it: float32 beside all but float64.
double rounded(double alpha, const Tensor& x) {
  return dtype_of(x) == DType::kFloat64 ? alpha : double(float(alpha));
}

Tensor fused_relu_scale_cpu(const Tensor& x, double alpha) {
  alpha = rounded(alpha, x);
  const auto f = [=](double v) { return (v < 0 ? 0 : v) * alpha; };
  return elementwise_cpu("fused_relu_scale", f, x);
}

Tensor fused_relu_scale_cuda(const Tensor& x, double alpha) {
  const auto launcher = [=](const Strided<1>& problem, cudaStream_t stream) {
    return fused_relu_scale_launch(problem, alpha, stream);
  };
  return elementwise_cuda("fused_relu_scale", launcher, x);
}

Tensor fused_relu_scale_backward_cpu(const Tensor& grad_out, const Tensor& x, double alpha) {
  alpha = rounded(alpha, x);
  const auto f = [=](double g, double v) { return v <= 0 ? 0 : g * alpha; };
  return elementwise_cpu("fused_relu_scale_backward", f, grad_out, x);
}

Tensor fused_relu_scale_backward_cuda(const Tensor& grad_out, const Tensor& x, double alpha) {
  const auto launcher = [=](const Strided<2>& problem, cudaStream_t stream) {
    return fused_relu_scale_backward_launch(problem, alpha, stream);
  };
  return elementwise_cuda("fused_relu_scale_backward", launcher, grad_out, x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("fused_relu_scale(Tensor x, float alpha) -> Tensor", "()->()")
      .dtypes(kFloating)
      .doc(R"(Rectify x and scale it: relu(x) * alpha, in one pass.

Shapes: x (...); the result has the shape of x, and its layout where x is dense.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The arithmetic runs in
float64 for float64 and in float32 for the others; alpha is rounded to that type.
Errors: RuntimeError for any other dtype.
Formula: relu as in torch.nn.functional.relu; NaN stays NaN.)")
      .cpu<fused_relu_scale_cpu>()
      .cuda<fused_relu_scale_cuda>();
  library
      .op("fused_relu_scale_backward(Tensor grad_out, Tensor x, float alpha) -> Tensor grad_x",
          "(),()->()")
      .dtypes(kFloating)
      .doc(R"(Gradient of fused_relu_scale: 0 where x <= 0, else grad_out * alpha.

Shapes: grad_out and x (...), broadcast; grad_x has the broadcast shape.
Dtypes: float64, float32, float16 or bfloat16, the same for both.
Errors: RuntimeError for another dtype, two dtypes, two devices, or shapes that do not broadcast.
Formula: d relu(x) / dx is 1 for x > 0 and 0 otherwise, torch's choice at 0.)")
      .cpu<fused_relu_scale_backward_cpu>()
      .cuda<fused_relu_scale_backward_cuda>();
}
