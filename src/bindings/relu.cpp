// relu(x) = max(x, 0), and its gradient.
#include "binding.h"
#include "by_torch.h"

using namespace cuda_ops;

cudaError_t relu_launch(const Strided<1>& problem, cudaStream_t stream);
cudaError_t relu_backward_launch(const Strided<2>& problem, cudaStream_t stream);

namespace {

Tensor relu_cpu(const Tensor& x) {
  return elementwise_cpu([](double v) { return v <= 0 ? 0 : v; }, x);
}

// Not by aten::relu, which writes to memory of its own and copies.
Tensor relu_by_torch(const Tensor& x) {
  const Tensor out = empty_elementwise(x);
  strided(out, x);  // refuses what the kernel does
  return call<Tensor>("aten::clamp_min", "Tensor_out", x, scalar(0, x), out);
}

Tensor relu_cuda(const Tensor& x) { return elementwise_cuda(relu_launch, x); }

Tensor relu_backward_cpu(const Tensor& grad_out, const Tensor& out) {
  const auto f = [](double g, double v) { return v <= 0 ? 0 : g; };
  return elementwise_cpu(f, grad_out, out);
}

Tensor relu_backward_cuda(const Tensor& grad_out, const Tensor& out) {
  return elementwise_cuda(relu_backward_launch, grad_out, out);
}

}  // namespace

CUDA_OPS(library) {
  library.op("relu(Tensor x) -> Tensor", "()->()")
      .dtypes(kFloating)
      .doc(R"(Rectified linear unit: x where x > 0, else 0; NaN stays NaN.

Shapes: x (...); the result has the shape of x, and its layout where x is dense.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The arithmetic runs in
float64 for float64 and in float32 for the others.
Errors: RuntimeError for any other dtype.
Formula: max(x, 0); as torch.relu.

Example:
>>> cuda_ops.relu(torch.tensor([-1.0, 0.0, 2.0]))
tensor([0., 0., 2.]))")
      .cpu<relu_cpu, relu_by_torch>()
      .cuda<relu_cuda>();
  library.op("relu_backward(Tensor grad_out, Tensor out) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating)
      .doc(
          R"(Gradient of relu, from its result: grad_out where out > 0 or NaN, else 0.

Shapes: grad_out and out (...), broadcast; the result has the broadcast shape.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not broadcast.
Formula: as torch.ops.aten.threshold_backward(grad_out, out, 0).)")
      .cpu<relu_backward_cpu>()
      .cuda<relu_backward_cuda>();
}
