// silu(x) = x * sigmoid(x), and its gradient.
#include "binding.h"

using namespace cuda_ops;

cudaError_t silu_launch(const Strided<1>& problem, cudaStream_t stream);
cudaError_t silu_backward_launch(const Strided<2>& problem, cudaStream_t stream);

namespace {

Tensor silu_cpu(const Tensor& x) {
  Tensor out = empty_elementwise("silu", x);
  map_cpu(strided(out, x), [](double v) { return v / (1 + std::exp(-v)); });
  return out;
}

Tensor silu_cuda(const Tensor& x) {
  Tensor out = empty_elementwise("silu", x);
  launch("silu", x, [&](cudaStream_t stream) { return silu_launch(strided(out, x), stream); });
  return out;
}

Tensor silu_backward_cpu(const Tensor& grad_out, const Tensor& x) {
  Tensor grad_x = empty_elementwise("silu_backward", grad_out, x);
  map_cpu(strided(grad_x, grad_out, x), [](double g, double v) {
    const double s = 1 / (1 + std::exp(-v));
    return g * s * (1 + v * (1 - s));
  });
  return grad_x;
}

Tensor silu_backward_cuda(const Tensor& grad_out, const Tensor& x) {
  Tensor grad_x = empty_elementwise("silu_backward", grad_out, x);
  launch("silu_backward", x, [&](cudaStream_t stream) {
    return silu_backward_launch(strided(grad_x, grad_out, x), stream);
  });
  return grad_x;
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
with NaN for -inf, where the limit would be 0.)")
      .cpu<silu_cpu>()
      .cuda<silu_cuda>();
  library.op("silu_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating)
      .doc(R"(Gradient of silu: grad_out * s * (1 + x * (1 - s)) with s = sigmoid(x).

Shapes: grad_out and x (...), broadcast; grad_x has the broadcast shape.
Dtypes: float64, float32, float16 or bfloat16, the same for both.
Errors: RuntimeError for another dtype, two dtypes, two devices, or shapes that do not broadcast.
Formula: the derivative of x * sigmoid(x), by the product rule.)")
      .cpu<silu_backward_cpu>()
      .cuda<silu_backward_cuda>();
}
