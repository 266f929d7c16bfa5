// add_rms_norm_(x, residual, weight): residual += x, then x = rms_norm(residual), both in place.
#include "binding.h"
#include "norm/norm_binding.h"

using namespace cuda_ops;

cudaError_t add_rms_norm_launch(const Norm& problem, cudaStream_t stream);

namespace {

// Calls run(problem) on rows of x and residual; copies of them, where they are not even, go back.
template <class Run>
void add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                  Run run) {
  check_weight(x, weight);
  const Tensor rows = even_rows(x), sums = even_rows(residual);
  const Tensor weights = contiguous(weight);
  Norm p = norm_of(rows, weights, eps);
  p.out = rows.mutable_data_ptr();
  p.out_step = p.x_step;
  p.residual = sums.mutable_data_ptr();
  p.residual_step = row_step(sums);
  run(p);
  copy_back(x, rows);
  copy_back(residual, sums);
}

void add_rms_norm_cpu(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  add_rms_norm(x, residual, weight, eps, [](const Norm& p) { norm_cpu(NormKind::kAddRms, p); });
}

void add_rms_norm_cuda(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  add_rms_norm(x, residual, weight, eps, [&](const Norm& p) {
    launch(x, [&](cudaStream_t stream) { return add_rms_norm_launch(p, stream); });
  });
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-6) -> ()",
          "(n),(n),[n]->")
      .dtypes(kFloating)
      .dtypes("weight", kFloating)
      .doc(
          R"(Adds x to residual, then writes the RMS norm of the sum to x: both in place, in one pass.

There is no gradient: call it under torch.no_grad().

Shapes: x and residual (..., N) of the same shape and any strides, weight [N]. Where rows are not
equally far apart, or their elements not adjacent, the work is done on a copy that is copied back.
Dtypes: float64, float32, float16 or bfloat16, the same for x and residual. The weight has
that too, or float32 where x is a half. The sum is rounded to the dtype of x, as residual keeps it,
and normalized in float64 for float64 and in float32 for the others.
Errors: RuntimeError for any other dtype, mixed dtypes of x and residual, mixed devices, shapes that
differ, an x and a residual that share memory, or an argument that requires a gradient.
Formula: residual += x; x = rms_norm(residual, weight, eps), as fused_add_rms_norm of vLLM.

Example:
>>> x, residual = torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]])
>>> cuda_ops.add_rms_norm_(x, residual, torch.ones(2))
>>> x, residual
(tensor([[0.8485, 1.1314]]), tensor([[3., 4.]])))")
      .cpu<add_rms_norm_cpu>()
      .cuda<add_rms_norm_cuda>();
}
