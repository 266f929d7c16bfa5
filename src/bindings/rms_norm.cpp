// rms_norm(x, weight): each row over the root of its mean square, and its gradient.
#include "binding.h"
#include "norm/norm_binding.h"

using namespace cuda_ops;

cudaError_t rms_norm_launch(const Norm& problem, cudaStream_t stream);
int64_t rms_norm_backward_partials(const NormGradient& problem);
cudaError_t rms_norm_backward_launch(const NormGradient& problem, cudaStream_t stream);

namespace {

// Allocates the result and calls run(problem, like).
template <class Run>
Tensor normalized(const Tensor& x, const Tensor& weight, double eps, Run run) {
  check_weight(x, weight);
  Tensor out = empty(shape_of(x), x);
  const Tensor rows = even_rows(x), weights = contiguous(weight);
  Norm p = norm_of(rows, weights, eps);
  p.out = out.mutable_data_ptr();
  p.out_step = p.n;
  run(p);
  return out;
}

Tensor rms_norm_cpu(const Tensor& x, const Tensor& weight, double eps) {
  return normalized(x, weight, eps, [](const Norm& p) { norm_cpu(NormKind::kRms, p); });
}

Tensor rms_norm_cuda(const Tensor& x, const Tensor& weight, double eps) {
  return normalized(x, weight, eps, [&](const Norm& p) {
    launch(x, [&](cudaStream_t stream) { return rms_norm_launch(p, stream); });
  });
}

using Gradients = std::tuple<Tensor, Tensor>;

template <class Run>
Gradients gradients(const Tensor& grad_out, const Tensor& x, const Tensor& weight, double eps,
                    Run run) {
  check_weight(x, weight);
  const Tensor grads = contiguous(grad_out), rows = contiguous(x);
  const Tensor weights = contiguous(weight);
  Tensor grad_x = empty(shape_of(x), x), grad_weight = empty(shape_of(weight), weight);
  NormGradient p;
  p.norm = norm_of(rows, weights, eps);
  p.grad_out = grads.const_data_ptr();
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_weight = grad_weight.mutable_data_ptr();
  run(p);
  return {grad_x, grad_weight};
}

Gradients rms_norm_backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                double eps) {
  return gradients(grad_out, x, weight, eps,
                   [](const NormGradient& p) { norm_gradient_cpu(NormKind::kRms, p); });
}

Gradients rms_norm_backward_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                 double eps) {
  return gradients(grad_out, x, weight, eps, [&](NormGradient& p) {
    launch(x, [&](cudaStream_t stream) {
      // Freed when this returns: torch's allocator gives it to later work of this stream only.
      const Tensor partials =
          empty({rms_norm_backward_partials(p)}, compute_dtype(p.norm.dtype), x);
      p.partials = partials.mutable_data_ptr();
      return rms_norm_backward_launch(p, stream);
    });
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor", "(n),[n]->(n)")
      .dtypes(kFloating)
      .dtypes("weight", kFloating)
      .doc(R"(RMS norm over the last dim: x over the root of its mean square, times a weight.

The gradient reads x again and computes the roots anew, so nothing is kept beside the arguments. That
of the weight has the same bits every time.

Shapes: x (..., N) of any strides, weight [N]; the result (..., N) is contiguous. Where rows are not
equally far apart, or their elements not adjacent, x is copied first.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The weight has that too,
or float32 where x is a half. Sums run in float64 for float64 and in float32 for the others, and each
result is rounded once.
Errors: RuntimeError for any other dtype, no dims, another size of weight, or mixed devices.
Formula: Zhang and Sennrich, https://arxiv.org/abs/1910.07467:
x / sqrt(mean(x^2) + eps) * weight, as torch.nn.functional.rms_norm(x, [N], weight, eps).

Example:
>>> cuda_ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2))
tensor([[0.8485, 1.1314]]))")
      .cpu<rms_norm_cpu>()
      .cuda<rms_norm_cuda>();
  library
      .op("rms_norm_backward(Tensor grad_out, Tensor x, Tensor weight, float eps=1e-6) -> (Tensor "
          "grad_x, Tensor grad_weight)",
          "(n),(n),[n]->(n),[n]")
      .dtypes(kFloating)
      .broadcast()
      .dtypes("weight", kFloating)
      .doc(R"(Gradient of rms_norm.

Shapes: grad_out and x (..., N), weight [N]; grad_x (..., N) and grad_weight [N], summed over all
rows, are contiguous. Loop dims broadcast.
Dtypes: as for rms_norm; grad_out has that of x, and grad_weight that of weight.
Errors: RuntimeError for any other dtype, mixed dtypes of grad_out and x, mixed devices, or shapes
that do not fit.
Formula: with y = x s, s = 1 / sqrt(mean(x^2) + eps) and g = grad_out weight:
grad_x = s (g - y mean(g y)); grad_weight = the sum of grad_out y over the rows.)")
      .cpu<rms_norm_backward_cpu>()
      .cuda<rms_norm_backward_cuda>();
}
