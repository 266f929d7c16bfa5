// gelu(x @ weight^T + bias) in one pass, the same with the preactivation kept, and what the
// gradient computes if it was not.
#include "gemm/fused_linear_gelu.h"

#include "gelu_by_torch.h"
#include "gemm/matmul_binding.h"

using namespace cuda_ops;

GemmPlan fused_linear_gelu_plan(const LinearGelu& problem);
cudaError_t fused_linear_gelu_launch(const LinearGelu& problem, const GemmPlan& plan,
                                     void* workspace, cudaStream_t stream);

namespace {

using MaybeTensor = std::optional<Tensor>;

// The arguments of one call, outputs allocated. Kernels read neighbors of the bias
// and of grad_out, so those are dense; a bias for each row has the layout of out.
struct Call {
  Tensor x, weight, out;
  MaybeTensor bias, grad_out, preactivation;
  LinearGelu problem;

  Call(const Tensor& x_, const Tensor& weight_, const MaybeTensor& bias_,
       const MaybeTensor& grad_out_, bool keep)
      : x(x_), weight(weight_) {
    View lines = weight;  // (..., O), rows of I elements each
    --lines.dims;
    lines.last_size = lines.sizes[lines.dims - 1];
    const View inputs[] = {x, lines, bias_ ? *bias_ : x, grad_out_ ? *grad_out_ : x};
    std::vector<int64_t> shape = broadcast_shape(inputs, 1);
    check_batch("x", x, shape);
    shape.push_back(lines.last_size);
    out = empty(shape, x);
    if (keep) preactivation = empty(shape, x);
    if (grad_out_) grad_out = contiguous(*grad_out_, shape);
    problem.bias_as_out = bias_ && bias_->dim() > 1;
    if (bias_) bias = problem.bias_as_out ? contiguous(*bias_, shape) : contiguous(*bias_);

    problem.product = rows_times_weights(lines);
    if (bias) problem.bias = bias->const_data_ptr();
    if (grad_out) problem.grad_out = grad_out->const_data_ptr();
    if (preactivation) problem.preactivation = preactivation->mutable_data_ptr();
  }

  // Each row of x is a batch; those that one weight multiplies are rows of a matrix.
  Matmul rows_times_weights(const View& lines) const {
    const Matrix w = transposed(weight);
    Matmul p;
    p.batch = strided({writable_view(out)}, {View(x), lines}, 1);
    p.m = 1;
    p.n = w.cols;
    p.k = w.rows;
    p.out = {w.cols, 1};
    p.a = {w.rows, x.stride(x.dim() - 1)};
    p.b = w.strides;
    p.built_for_hopper = built_for_hopper();
    int rows = -1;  // the longest dim along which the weight stays
    for (int d = 0; d < p.batch.dims; ++d) {
      const bool longer = rows < 0 || p.batch.sizes[d] > p.batch.sizes[rows];
      if (p.batch.operands[2].strides[d] == 0 && longer) rows = d;
    }
    if (rows < 0) return p;
    p.m = p.batch.sizes[rows];
    p.out.row = p.batch.operands[0].strides[rows];
    p.a.row = p.batch.operands[1].strides[rows];
    p.batch.drop_dim(rows);
    return p;
  }

  void run_cpu() const {
    multiply(problem.product, [&](auto tag, int64_t row, std::vector<double>& sums) {
      using T = decltype(tag);
      const auto* biases = static_cast<const T*>(problem.bias);
      const auto* grads = static_cast<const T*>(problem.grad_out);
      auto* kept = static_cast<T*>(problem.preactivation);
      const int64_t first_bias = problem.bias_as_out ? row : 0;
      for (size_t j = 0; j < sums.size(); ++j) {
        double& sum = sums[j];
        if (biases != nullptr) sum += static_cast<double>(biases[first_bias + j]);
        if (kept != nullptr) kept[row + j] = static_cast<T>(sum);
        sum = grads != nullptr ? static_cast<double>(grads[row + j]) * gelu::first(sum)
                               : gelu::value(sum);
      }
    });
  }

  // Torch has one weight, and one bias, for all rows.
  void run_by_torch() const {
    if (weight.dim() != 2 || problem.bias_as_out) return run_cpu();
    const MaybeTensor biases = bias ? MaybeTensor(widened(*bias)) : MaybeTensor();
    const Tensor sums =
        cuda_ops::call<Tensor>("aten::linear", "", widened(x), widened(weight), biases);
    if (preactivation) write_rounded(*preactivation, sums);
    write_rounded(out, gelu_by_torch(sums));
  }

  void run_cuda() const {
    launch(x, [&](cudaStream_t stream) {
      const GemmPlan plan = fused_linear_gelu_plan(problem);
      return with_workspace(x, plan, [&](void* workspace) {
        return fused_linear_gelu_launch(problem, plan, workspace, stream);
      });
    });
  }
};

// --- CPU ----------------------------------------------------------------------

Tensor fused_linear_gelu_cpu(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  const Call call(x, weight, bias, {}, false);
  call.run_cpu();
  return call.out;
}

std::tuple<Tensor, Tensor> fused_linear_gelu_keep_cpu(const Tensor& x, const Tensor& weight,
                                                      const MaybeTensor& bias) {
  const Call call(x, weight, bias, {}, true);
  call.run_cpu();
  return {call.out, *call.preactivation};
}

Tensor fused_linear_gelu_by_torch(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  const Call call(x, weight, bias, {}, false);
  call.run_by_torch();
  return call.out;
}

std::tuple<Tensor, Tensor> fused_linear_gelu_keep_by_torch(const Tensor& x, const Tensor& weight,
                                                           const MaybeTensor& bias) {
  const Call call(x, weight, bias, {}, true);
  call.run_by_torch();
  return {call.out, *call.preactivation};
}

Tensor fused_linear_gelu_slope_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                   const MaybeTensor& bias) {
  const Call call(x, weight, bias, grad_out, false);
  call.run_cpu();
  return call.out;
}

// --- CUDA ---------------------------------------------------------------------

Tensor fused_linear_gelu_cuda(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  const Call call(x, weight, bias, {}, false);
  call.run_cuda();
  return call.out;
}

std::tuple<Tensor, Tensor> fused_linear_gelu_keep_cuda(const Tensor& x, const Tensor& weight,
                                                       const MaybeTensor& bias) {
  const Call call(x, weight, bias, {}, true);
  call.run_cuda();
  return {call.out, *call.preactivation};
}

Tensor fused_linear_gelu_slope_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                    const MaybeTensor& bias) {
  const Call call(x, weight, bias, grad_out, false);
  call.run_cuda();
  return call.out;
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("fused_linear_gelu(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
          "(i),(o,i),(o)->(o)")
      .dtypes(kFloating)
      .calls("matmul")  // these three in gradients
      .calls("sum_rows")
      .calls("gelu_approx")
      .cpu<fused_linear_gelu_cpu, fused_linear_gelu_by_torch>()
      .cuda<fused_linear_gelu_cuda>();
  library
      .op("fused_linear_gelu_keep(Tensor x, Tensor weight, Tensor? bias=None) -> (Tensor out, "
          "Tensor preactivation)",
          "(i),(o,i),(o)->(o),(o)")
      .dtypes(kFloating)
      .doc(
          R"(fused_linear_gelu and also x @ weight^T + bias, which makes gradients cheaper.

Shapes: x (..., I), weight (O, I), bias (O) or None; out and preactivation (..., O) are contiguous.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError as in fused_linear_gelu.
Formula: as in fused_linear_gelu.)")
      .cpu<fused_linear_gelu_keep_cpu, fused_linear_gelu_keep_by_torch>()
      .cuda<fused_linear_gelu_keep_cuda>();
  library
      .op("fused_linear_gelu_slope(Tensor grad_out, Tensor x, Tensor weight, Tensor? bias=None) -> "
          "Tensor",
          "(o),(i),(o,i),(o)->(o)")
      .dtypes(kFloating)
      .doc(R"(grad_out * gelu'(x @ weight^T + bias); recomputes the product instead of keeping it.

Shapes: grad_out (..., O), x (..., I), weight (O, I), bias (O); the result (..., O) is contiguous.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError as in fused_linear_gelu.
Formula: the chain rule for fused_linear_gelu.)")
      .cpu<fused_linear_gelu_slope_cpu>()
      .cuda<fused_linear_gelu_slope_cuda>();
}
