// silu_and_mul(x) = silu(gate) * up for x = [gate, up], and its derivatives in both modes.
#include "binding.h"
#include "by_torch.h"

using namespace cuda_ops;

cudaError_t silu_and_mul_launch(const Strided<2>& problem, cudaStream_t stream);
cudaError_t silu_and_mul_jvp_launch(const Strided<4>& problem, cudaStream_t stream);
cudaError_t silu_and_mul_backward_launch(const Strided<3, 2>& problem, cudaStream_t stream);

namespace {

Tensor empty_half(const View& x, const Tensor& like) {
  std::vector<int64_t> shape(x.sizes, x.sizes + x.dims);
  shape.back() /= 2;
  return empty(shape, like);
}

Strided<2> problem(const Tensor& out, const View& x) {
  return strided({writable_view(out)}, {x.chunk(2, 0), x.chunk(2, 1)});
}

Strided<3, 2> gradient_problem(const View& grad_x, const Tensor& grad_out, const View& x) {
  return strided({grad_x.chunk(2, 0), grad_x.chunk(2, 1)},
                 {grad_out, x.chunk(2, 0), x.chunk(2, 1)});
}

Strided<4> tangent_problem(const Tensor& out, const View& x, const View& tangent_x) {
  return strided({writable_view(out)},
                 {x.chunk(2, 0), x.chunk(2, 1), tangent_x.chunk(2, 0), tangent_x.chunk(2, 1)});
}

Tensor silu_and_mul_cpu(const Tensor& x) {
  Tensor out = empty_half(x, x);
  map_cpu(problem(out, x), [](double gate, double up) { return gate * sigmoid(gate) * up; });
  return out;
}

Tensor silu_and_mul_by_torch(const Tensor& x) {
  Tensor out = empty_half(x, x);
  problem(out, x);  // refuses what the kernel does
  const Tensor wide = widened(x);
  const int64_t last = x.dim() - 1, count = x.size(last) / 2;
  const auto half = [&](int64_t first) {
    return call<Tensor>("aten::narrow", "", wide, last, first, count);
  };
  write_rounded(out, mul(call<Tensor>("aten::silu", "", half(0)), half(count)));
  return out;
}

Tensor silu_and_mul_cuda(const Tensor& x) {
  Tensor out = empty_half(x, x);
  launch(x, [&](cudaStream_t stream) { return silu_and_mul_launch(problem(out, x), stream); });
  return out;
}

Tensor silu_and_mul_backward_cpu(const Tensor& grad_out, const Tensor& x) {
  Tensor grad_x = empty(shape_of(x), x);
  map_cpu(gradient_problem(writable_view(grad_x), grad_out, x),
          [](double g, double gate, double up) {
            const double s = sigmoid(gate);
            return Results<double, 2>{g * up * s * (1 + gate * (1 - s)), g * gate * s};
          });
  return grad_x;
}

Tensor silu_and_mul_backward_cuda(const Tensor& grad_out, const Tensor& x) {
  Tensor grad_x = empty(shape_of(x), x);
  launch(x, [&](cudaStream_t stream) {
    return silu_and_mul_backward_launch(gradient_problem(writable_view(grad_x), grad_out, x),
                                        stream);
  });
  return grad_x;
}

Tensor silu_and_mul_jvp_cpu(const Tensor& x, const Tensor& tangent_x) {
  Tensor tangent = empty_half(x, x);
  map_cpu(tangent_problem(tangent, x, tangent_x),
          [](double gate, double up, double along_gate, double along_up) {
            const double s = sigmoid(gate);
            return along_gate * up * s * (1 + gate * (1 - s)) + along_up * gate * s;
          });
  return tangent;
}

Tensor silu_and_mul_jvp_cuda(const Tensor& x, const Tensor& tangent_x) {
  Tensor tangent = empty_half(x, x);
  launch(x, [&](cudaStream_t stream) {
    return silu_and_mul_jvp_launch(tangent_problem(tangent, x, tangent_x), stream);
  });
  return tangent;
}

}  // namespace

CUDA_OPS(library) {
  library.op("silu_and_mul(Tensor x) -> Tensor", "(2d)->(d)")
      .dtypes(kFloating)
      .doc(
          R"(Gated linear unit of a SwiGLU layer: silu(gate) * up, where x is [gate, up] along its last dim.

Shapes: x (..., 2 D); the result (..., D) is contiguous.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The arithmetic runs in
float64 for float64 and in float32 for the others, rounded once.
Errors: RuntimeError for any other dtype, no dims, or an odd last dim.
Formula: Shazeer, https://arxiv.org/abs/2002.05202: x[..., :D] * sigmoid(x[..., :D]) * x[..., D:].

Example:
>>> cuda_ops.silu_and_mul(torch.tensor([1.0, 2.0, 10.0, 100.0]))
tensor([  7.3106, 176.1594]))")
      .cpu<silu_and_mul_cpu, silu_and_mul_by_torch>()
      .cuda<silu_and_mul_cuda>();
  library.op("silu_and_mul_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(d),(2d)->(2d)")
      .dtypes(kFloating)
      .broadcast()
      .doc(R"(Gradient of silu_and_mul, for gate and up side by side as in x.

Shapes: grad_out (..., D), x (..., 2 D); grad_x (..., 2 D) is contiguous. Loop dims broadcast.
Dtypes: float64, float32, float16 or bfloat16, the same for both.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not fit.
Formula: grad_out * up * silu'(gate) and grad_out * silu(gate).)")
      .cpu<silu_and_mul_backward_cpu>()
      .cuda<silu_and_mul_backward_cuda>();
  library.op("silu_and_mul_jvp(Tensor x, Tensor tangent_x) -> Tensor", "(2d),(2d)->(d)")
      .dtypes(kFloating)
      .broadcast()
      .doc(R"(Derivative of silu_and_mul in forward mode, along tangent_x.

Shapes: x and tangent_x (..., 2 D); the result (..., D) is contiguous. Loop dims broadcast.
Dtypes: float64, float32, float16 or bfloat16, the same for both.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not fit.
Formula: tangent_gate * up * silu'(gate) + tangent_up * silu(gate).)")
      .cpu<silu_and_mul_jvp_cpu>()
      .cuda<silu_and_mul_jvp_cuda>();
}
