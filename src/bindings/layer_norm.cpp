// layer_norm(x, weight, bias): each row less its mean, over its deviation, and its gradient.
#include "binding.h"
#include "by_torch.h"
#include "norm/norm_binding.h"

using namespace cuda_ops;

cudaError_t layer_norm_launch(const Norm& problem, cudaStream_t stream);
int64_t layer_norm_backward_partials(const NormGradient& problem);
cudaError_t layer_norm_backward_launch(const NormGradient& problem, cudaStream_t stream);

namespace {

// Allocates the result and calls run(problem, like).
template <class Run>
Tensor normalized(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, Run run) {
  check_weight(x, weight);
  check_bias(weight, bias);
  Tensor out = empty(shape_of(x), x);
  const Tensor rows = even_rows(x);
  const Tensor weights = contiguous(weight), biases = contiguous(bias);
  Norm p = norm_of(rows, weights, eps);
  p.bias = biases.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.out_step = p.n;
  run(p);
  return out;
}

Tensor layer_norm_cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return normalized(x, weight, bias, eps, [](const Norm& p) { norm_cpu(NormKind::kLayer, p); });
}

Tensor layer_norm_by_torch(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  check_weight(x, weight);
  check_bias(weight, bias);
  using All = std::tuple<Tensor, Tensor, Tensor>;  // the second and third are statistics
  const std::vector<int64_t> last{x.size(x.dim() - 1)};
  // With 16 bits torch scales x and the mean before it takes one from the other: numbers that are
  // all 777 are off by a sixth.
  const auto wide = call<All>("aten::native_layer_norm", "", widened(x), last,
                              std::optional(widened(weight)), std::optional(widened(bias)), eps);
  if (size_of(dtype_of(x)) > 2) return std::get<0>(wide);
  Tensor out = empty(shape_of(x), x);
  write_rounded(out, std::get<0>(wide));
  return out;
}

Tensor layer_norm_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return normalized(x, weight, bias, eps, [&](const Norm& p) {
    launch(x, [&](cudaStream_t stream) { return layer_norm_launch(p, stream); });
  });
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

template <class Run>
Gradients gradients(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                    const Tensor& bias, double eps, Run run) {
  check_weight(x, weight);
  check_bias(weight, bias);
  const Tensor grads = contiguous(grad_out), rows = contiguous(x);
  const Tensor weights = contiguous(weight);
  Tensor grad_x = empty(shape_of(x), x);
  Tensor grad_weight = empty(shape_of(weight), weight), grad_bias = empty(shape_of(weight), weight);
  NormGradient p;
  p.norm = norm_of(rows, weights, eps);
  p.grad_out = grads.const_data_ptr();
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_weight = grad_weight.mutable_data_ptr();
  p.grad_bias = grad_bias.mutable_data_ptr();
  run(p);
  return {grad_x, grad_weight, grad_bias};
}

Gradients layer_norm_backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                  const Tensor& bias, double eps) {
  return gradients(grad_out, x, weight, bias, eps,
                   [](const NormGradient& p) { norm_gradient_cpu(NormKind::kLayer, p); });
}

Gradients layer_norm_backward_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                   const Tensor& bias, double eps) {
  return gradients(grad_out, x, weight, bias, eps, [&](NormGradient& p) {
    launch(x, [&](cudaStream_t stream) {
      // Freed when this returns: torch's allocator gives it to later work of this stream only.
      const Tensor partials =
          empty({layer_norm_backward_partials(p)}, compute_dtype(p.norm.dtype), x);
      p.partials = partials.mutable_data_ptr();
      return layer_norm_backward_launch(p, stream);
    });
  });
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-5) -> Tensor",
          "(n),[n],[n]->(n)")
      .dtypes(kFloating)
      .dtypes("weight", kFloating)
      .dtypes("bias", kFloating)
      .doc(
          R"(Layer norm over the last dim: x less its mean, over its deviation, times weight plus bias.

The gradient reads x again and computes both anew, so nothing is kept beside the arguments. Those of
weight and bias have the same bits every time.

Shapes: x (..., N) of any strides, weight and bias [N]; the result (..., N) is contiguous. Where rows
are not equally far apart, or their elements not adjacent, x is copied first.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. Weight and bias have
that too, or both float32 where x is a half. Sums run in float64 for float64 and in float32 for the
others, and each result is rounded once.
Errors: RuntimeError for any other dtype, no dims, another size of weight or bias, or mixed devices.
Formula: Ba, Kiros and Hinton, https://arxiv.org/abs/1607.06450:
(x - mean) / sqrt(variance + eps) * weight + bias, where the variance is mean((x - mean)^2), as
torch.nn.functional.layer_norm(x, [N], weight, bias, eps).

Example:
>>> cuda_ops.layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2))
tensor([[-1.0000,  1.0000]]))")
      .cpu<layer_norm_cpu, layer_norm_by_torch>()
      .cuda<layer_norm_cuda>();
  library
      .op("layer_norm_backward(Tensor grad_out, Tensor x, Tensor weight, Tensor bias, float "
          "eps=1e-5) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
          "(n),(n),[n],[n]->(n),[n],[n]")
      .dtypes(kFloating)
      .broadcast()
      .dtypes("weight", kFloating)
      .dtypes("bias", kFloating)
      .doc(R"(Gradient of layer_norm; of bias it takes the dtype alone.

Shapes: grad_out and x (..., N), weight and bias [N]; grad_x (..., N), and grad_weight and grad_bias
[N], summed over all rows, are contiguous. Loop dims broadcast.
Dtypes: as for layer_norm; grad_out has that of x, grad_weight that of weight, grad_bias that of bias.
Errors: RuntimeError for any other dtype, mixed dtypes of grad_out and x, mixed devices, or shapes
that do not fit.
Formula: with y = (x - mean) s, s = 1 / sqrt(variance + eps) and g = grad_out weight:
grad_x = s (g - mean(g) - y mean(g y)); grad_weight and grad_bias = the sums of grad_out y and of
grad_out over the rows.)")
      .cpu<layer_norm_backward_cpu>()
      .cuda<layer_norm_backward_cuda>();
}
