// leaky_clip(x) = min(x < 0 ? slope * x : x, limit), and its gradient.
#include "binding.h"

using namespace cuda_ops;

cudaError_t leaky_clip_launch(const Strided<1>& problem, double slope, double limit,
                              cudaStream_t stream);
cudaError_t leaky_clip_backward_launch(const Strided<2>& problem, double slope, double limit,
                                       cudaStream_t stream);

namespace {

double leaky(double x, double slope) { return x < 0 ? slope * x : x; }

Tensor leaky_clip_cpu(const Tensor& x, double slope, double limit) {
  const auto f = [](double v, double slope, double limit) {
    const double value = leaky(v, slope);
    return value > limit || limit != limit ? limit : value;
  };
  return elementwise_cpu(f, x, slope, limit);
}

Tensor leaky_clip_cuda(const Tensor& x, double slope, double limit) {
  return elementwise_cuda(leaky_clip_launch, x, slope, limit);
}

Tensor leaky_clip_backward_cpu(const Tensor& grad_out, const Tensor& x, double slope,
                               double limit) {
  const auto f = [](double g, double v, double slope, double limit) {
    if (leaky(v, slope) > limit) return 0.0;
    return v <= 0 ? slope * g : g;
  };
  return elementwise_cpu(f, grad_out, x, slope, limit);
}

Tensor leaky_clip_backward_cuda(const Tensor& grad_out, const Tensor& x, double slope,
                                double limit) {
  return elementwise_cuda(leaky_clip_backward_launch, grad_out, x, slope, limit);
}

}  // namespace

CUDA_OPS(cuda_ops_leaky, library) {
  library.op("leaky_clip(Tensor x, float slope, float limit) -> Tensor", "()->()")
      .dtypes(kFloating)
      .doc(R"(A leaky rectifier with a ceiling: min(x < 0 ? slope * x : x, limit).

Shapes: x (...); the result has the shape of x, and its layout where x is dense.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x.
Errors: RuntimeError for any other dtype.)")
      .cpu<leaky_clip_cpu>()
      .cuda<leaky_clip_cuda>();
  library
      .op("leaky_clip_backward(Tensor grad_out, Tensor x, float slope, float limit)"
          " -> Tensor grad_x",
          "(),()->()")
      .dtypes(kFloating)
      .doc(R"(Gradient of leaky_clip: 0 above the limit, slope * grad_out up to 0, grad_out between.

Shapes: grad_out and x (...), broadcast; grad_x has the broadcast shape.)")
      .cpu<leaky_clip_backward_cpu>()
      .cuda<leaky_clip_backward_cuda>();
}
