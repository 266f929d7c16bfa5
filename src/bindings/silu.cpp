// silu(x) = x * sigmoid(x), its gradient, and the gradient of that.
#include "binding.h"
#include "by_torch.h"

using namespace cuda_ops;

cudaError_t silu_launch(const Strided<1>& problem, cudaStream_t stream);
cudaError_t silu_backward_launch(const Strided<2>& problem, cudaStream_t stream);
cudaError_t silu_backward_backward_launch(const Strided<3, 2>& problem, cudaStream_t stream);

namespace {

double value(double v) { return v * sigmoid(v); }

double first(double v) {
  const double s = sigmoid(v);
  return s * (1 + v * (1 - s));
}

double second(double v) {
  const double s = sigmoid(v);
  return s * (1 - s) * (2 + v * (1 - 2 * s));
}

Results<double, 2> second_order(double gg, double g, double v) {
  return {gg * first(v), gg * g * second(v)};
}

Tensor silu_cpu(const Tensor& x) { return elementwise_cpu(value, x); }

Tensor silu_cuda(const Tensor& x) { return elementwise_cuda(silu_launch, x); }

Tensor silu_by_torch(const Tensor& x) { return elementwise_by_torch("aten::silu", "out", x); }

Tensor silu_backward_cpu(const Tensor& grad_out, const Tensor& x) {
  const auto f = [](double g, double v) { return g * first(v); };
  return elementwise_cpu(f, grad_out, x);
}

Tensor silu_backward_cuda(const Tensor& grad_out, const Tensor& x) {
  return elementwise_cuda(silu_backward_launch, grad_out, x);
}

Tensor silu_backward_by_torch(const Tensor& grad_out, const Tensor& x) {
  return elementwise_by_torch("aten::silu_backward", "grad_input", grad_out, x);
}

std::tuple<Tensor, Tensor> silu_backward_backward_cpu(const Tensor& grad_grad_x,
                                                      const Tensor& grad_out, const Tensor& x) {
  return elementwise_cpu<2>(second_order, grad_grad_x, grad_out, x);
}

std::tuple<Tensor, Tensor> silu_backward_backward_cuda(const Tensor& grad_grad_x,
                                                       const Tensor& grad_out, const Tensor& x) {
  return elementwise_cuda<2>(silu_backward_backward_launch, grad_grad_x, grad_out, x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("silu(Tensor x) -> Tensor", "()->()")
      .dtypes(kFloating)
      .doc(R"(Sigmoid-weighted linear unit: x * sigmoid(x), elementwise.

Shapes: x (...); the result has the shape of x, and its layout where x is dense.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The arithmetic runs in
float64 for float64 and in float32 for the others.
Errors: RuntimeError for any other dtype.
Formula: Elfwing, Uchibe and Doya, https://arxiv.org/abs/1702.03118; as torch.nn.functional.silu,
with NaN for -inf, where the limit would be 0.

Example:
>>> cuda_ops.silu(torch.tensor([-1.0, 0.0, 2.0]))
tensor([-0.2689,  0.0000,  1.7616]))")
      .cpu<silu_cpu, silu_by_torch>()
      .cuda<silu_cuda>();
  library.op("silu_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating)
      .doc(R"(Gradient of silu: grad_out * s * (1 + x * (1 - s)) with s = sigmoid(x).

Shapes: grad_out and x (...), broadcast; the result has the broadcast shape.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not broadcast.
Formula: the derivative of x * sigmoid(x), by the product rule.)")
      .cpu<silu_backward_cpu, silu_backward_by_torch>()
      .cuda<silu_backward_cuda>();
  library
      .op("silu_backward_backward(Tensor grad_grad_x, Tensor grad_out, Tensor x) -> (Tensor "
          "grad_grad_out, Tensor grad_x)",
          "(),(),()->(),()")
      .dtypes(kFloating)
      .doc(R"(Gradients of silu_backward: how its result changes with grad_out and with x.

Shapes: grad_grad_x, grad_out and x (...), broadcast; the result has the broadcast shape.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not broadcast.
Formula: silu'(x) and grad_out * silu''(x), times grad_grad_x; with s = sigmoid(x),
silu''(x) = s * (1 - s) * (2 + x * (1 - 2 s)).)")
      .cpu<silu_backward_backward_cpu>()
      .cuda<silu_backward_backward_cuda>();
}
