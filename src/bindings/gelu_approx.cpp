// gelu_approx(x), the tanh approximation of gelu, its gradient, and the gradient of that.
#include "binding.h"
#include "gelu_by_torch.h"

using namespace cuda_ops;

cudaError_t gelu_approx_launch(const Strided<1>& problem, cudaStream_t stream);
cudaError_t gelu_approx_backward_launch(const Strided<2>& problem, cudaStream_t stream);
cudaError_t gelu_approx_backward_backward_launch(const Strided<3, 2>& problem, cudaStream_t stream);

namespace {

Results<double, 2> second_order(double gg, double g, double v) {
  return {gg * gelu::first(v), gg * g * gelu::second(v)};
}

Tensor gelu_approx_cpu(const Tensor& x) { return elementwise_cpu(gelu::value, x); }

Tensor gelu_approx_by_torch(const Tensor& x) {
  Tensor out = empty_elementwise(x);
  strided(out, x);  // refuses what the kernel does
  write_rounded(out, gelu_by_torch(widened(x)));
  return out;
}

Tensor gelu_approx_cuda(const Tensor& x) { return elementwise_cuda(gelu_approx_launch, x); }

Tensor gelu_approx_backward_cpu(const Tensor& grad_out, const Tensor& x) {
  const auto f = [](double g, double v) { return g * gelu::first(v); };
  return elementwise_cpu(f, grad_out, x);
}

Tensor gelu_approx_backward_cuda(const Tensor& grad_out, const Tensor& x) {
  return elementwise_cuda(gelu_approx_backward_launch, grad_out, x);
}

std::tuple<Tensor, Tensor> gelu_approx_backward_backward_cpu(const Tensor& grad_grad_x,
                                                             const Tensor& grad_out,
                                                             const Tensor& x) {
  return elementwise_cpu<2>(second_order, grad_grad_x, grad_out, x);
}

std::tuple<Tensor, Tensor> gelu_approx_backward_backward_cuda(const Tensor& grad_grad_x,
                                                              const Tensor& grad_out,
                                                              const Tensor& x) {
  return elementwise_cuda<2>(gelu_approx_backward_backward_launch, grad_grad_x, grad_out, x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("gelu_approx(Tensor x) -> Tensor", "()->()")
      .dtypes(kFloating)
      .doc(R"(Gaussian error linear unit in its tanh approximation, elementwise.

Shapes: x (...); the result has the shape of x, and its layout where x is dense.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The arithmetic runs in
float64 for float64 and in float32 for the others.
Errors: RuntimeError for any other dtype.
Formula: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), Hendrycks and Gimpel,
https://arxiv.org/abs/1606.08415; as torch.nn.functional.gelu(x, approximate="tanh").

Example:
>>> cuda_ops.gelu_approx(torch.tensor([-1.0, 0.0, 2.0]))
tensor([-0.1588,  0.0000,  1.9546]))")
      .cpu<gelu_approx_cpu, gelu_approx_by_torch>()
      .cuda<gelu_approx_cuda>();
  library.op("gelu_approx_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating)
      .doc(R"(Gradient of gelu_approx.

Shapes: grad_out and x (...), broadcast; the result has the broadcast shape.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not broadcast.
Formula: the derivative by the product rule; where tanh has reached 1 it is 1 or 0, even where
x^2 would overflow.)")
      .cpu<gelu_approx_backward_cpu>()
      .cuda<gelu_approx_backward_cuda>();
  library
      .op("gelu_approx_backward_backward(Tensor grad_grad_x, Tensor grad_out, Tensor x) -> (Tensor "
          "grad_grad_out, Tensor grad_x)",
          "(),(),()->(),()")
      .dtypes(kFloating)
      .doc(R"(Gradients of gelu_approx_backward: how its result changes with grad_out and with x.

Shapes: grad_grad_x, grad_out and x (...), broadcast; the result has the broadcast shape.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not broadcast.
Formula: f'(x) and grad_out * f''(x), times grad_grad_x, for f = gelu_approx.)")
      .cpu<gelu_approx_backward_backward_cpu>()
      .cuda<gelu_approx_backward_backward_cuda>();
}
