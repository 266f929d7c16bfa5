// gelu(x @ weight^T + bias) in one pass, the same with the values before gelu kept,
// and what its gradient needs of them when they were not.
#include "fused_linear_gelu.h"

#include "gelu.h"
#include "tensor_matmul.h"

using namespace cuda_ops;

cudaError_t fused_linear_gelu_launch(const LinearGelu& problem, cudaStream_t stream);

namespace {

using MaybeTensor = std::optional<Tensor>;

void check(const char* op, const Tensor& weight, const MaybeTensor& bias) {
  if (weight.dim() != 2) refuse(op, "weight", "2 dims (o, i)", "shape " + shape_name(weight));
  if (bias && bias->dim() != 1) refuse(op, "bias", "1 dim (o)", "shape " + shape_name(*bias));
}

Tensor empty_like(const Tensor& x, const Tensor& weight) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = weight.size(0);
  return empty(shape, x);
}

// x as matrices of its last two dims; a vector is a matrix of one row.
LinearGelu problem(const Tensor& out, const Tensor& x, const Tensor& weight, const void* bias) {
  LinearGelu p;
  p.bias = bias;
  const Matrix w = transposed(weight);
  if (x.dim() > 1) {
    p.product = product(out, x, w);
    return p;
  }
  Matmul& one = p.product;
  one.m = 1;
  one.n = w.cols;
  one.k = w.rows;
  one.batch.dtype = dtype_of(x);
  one.batch.numel = 1;
  one.batch.operands[0].data = written(out).data;
  one.batch.operands[1].data = View(x).data;
  one.batch.operands[2].data = View(weight).data;
  one.out = {w.cols, 1};
  one.a = {w.rows, x.stride(0)};
  one.b = w.strides;
  one.built_for_hopper = built_for_hopper();
  return p;
}

// Kernels read neighbours of the bias; a copy of one row costs nothing.
MaybeTensor dense(const MaybeTensor& bias) {
  return bias ? MaybeTensor(contiguous(*bias)) : bias;
}

const void* data_of(const MaybeTensor& bias) { return bias ? View(*bias).data : nullptr; }

// --- CPU ----------------------------------------------------------------------

// finish(a tag of the element type, place of the row in out, column, x @ weight^T + bias).
template <class Finish>
void for_each_sum(const LinearGelu& p, Finish finish) {
  multiply(p.product, [&](auto tag, int64_t out, std::vector<double>& sums) {
    using T = decltype(tag);
    for (size_t j = 0; j < sums.size(); ++j) {
      if (p.bias != nullptr) sums[j] += static_cast<double>(static_cast<const T*>(p.bias)[j]);
      sums[j] = finish(tag, out + static_cast<int64_t>(j), sums[j]);
    }
  });
}

Tensor fused_linear_gelu_cpu(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  check("fused_linear_gelu", weight, bias);
  Tensor out = empty_like(x, weight);
  const MaybeTensor row = dense(bias);
  for_each_sum(problem(out, x, weight, data_of(row)),
               [](auto, int64_t, double sum) { return gelu::value(sum); });
  return out;
}

std::tuple<Tensor, Tensor> fused_linear_gelu_keep_cpu(const Tensor& x, const Tensor& weight,
                                                      const MaybeTensor& bias) {
  check("fused_linear_gelu_keep", weight, bias);
  Tensor out = empty_like(x, weight), preactivation = empty_like(x, weight);
  const MaybeTensor row = dense(bias);
  void* kept = written(preactivation).data;
  for_each_sum(problem(out, x, weight, data_of(row)), [&](auto tag, int64_t at, double sum) {
    using T = decltype(tag);
    static_cast<T*>(kept)[at] = static_cast<T>(sum);
    return gelu::value(sum);
  });
  return {out, preactivation};
}

Tensor fused_linear_gelu_slope_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                   const MaybeTensor& bias) {
  check("fused_linear_gelu_slope", weight, bias);
  Tensor out = empty_like(x, weight);
  const Tensor grad = contiguous(grad_out);
  const MaybeTensor row = dense(bias);
  const void* grads = View(grad).data;
  for_each_sum(problem(out, x, weight, data_of(row)), [&](auto tag, int64_t at, double sum) {
    using T = decltype(tag);
    return static_cast<double>(static_cast<const T*>(grads)[at]) * gelu::first(sum);
  });
  return out;
}

// --- CUDA ---------------------------------------------------------------------

Tensor fused_linear_gelu_cuda(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  check("fused_linear_gelu", weight, bias);
  Tensor out = empty_like(x, weight);
  const MaybeTensor row = dense(bias);
  const LinearGelu p = problem(out, x, weight, data_of(row));
  launch("fused_linear_gelu", x,
         [&](cudaStream_t stream) { return fused_linear_gelu_launch(p, stream); });
  return out;
}

std::tuple<Tensor, Tensor> fused_linear_gelu_keep_cuda(const Tensor& x, const Tensor& weight,
                                                       const MaybeTensor& bias) {
  check("fused_linear_gelu_keep", weight, bias);
  Tensor out = empty_like(x, weight), preactivation = empty_like(x, weight);
  const MaybeTensor row = dense(bias);
  LinearGelu p = problem(out, x, weight, data_of(row));
  p.preactivation = written(preactivation).data;
  launch("fused_linear_gelu_keep", x,
         [&](cudaStream_t stream) { return fused_linear_gelu_launch(p, stream); });
  return {out, preactivation};
}

Tensor fused_linear_gelu_slope_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                    const MaybeTensor& bias) {
  check("fused_linear_gelu_slope", weight, bias);
  Tensor out = empty_like(x, weight);
  const Tensor grad = contiguous(grad_out);
  const MaybeTensor row = dense(bias);
  LinearGelu p = problem(out, x, weight, data_of(row));
  p.grad_out = View(grad).data;
  launch("fused_linear_gelu_slope", x,
         [&](cudaStream_t stream) { return fused_linear_gelu_launch(p, stream); });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("fused_linear_gelu(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
             "(i),(o,i),(o)->(o)")
      .dtypes(kFloating)
      .cpu<fused_linear_gelu_cpu>()
      .cuda<fused_linear_gelu_cuda>();
  library
      .op("fused_linear_gelu_keep(Tensor x, Tensor weight, Tensor? bias=None) -> (Tensor out, "
          "Tensor preactivation)",
          "(i),(o,i),(o)->(o),(o)")
      .dtypes(kFloating)
      .doc(R"(fused_linear_gelu, and x @ weight^T + bias beside it, from which gradients are cheaper.

Shapes, dtypes and errors: as fused_linear_gelu; both outputs are contiguous.)")
      .cpu<fused_linear_gelu_keep_cpu>()
      .cuda<fused_linear_gelu_keep_cuda>();
  library
      .op("fused_linear_gelu_slope(Tensor grad_out, Tensor x, Tensor weight, Tensor? bias=None) -> "
          "Tensor",
          "(o),(i),(o,i),(o)->(o)")
      .dtypes(kFloating)
      .doc(R"(grad_out * gelu'(x @ weight^T + bias), the product recomputed instead of kept.

Shapes: grad_out (..., O), x (..., I), weight (O, I), bias (O); the result (..., O) is contiguous.
Dtypes and errors: as fused_linear_gelu.)")
      .cpu<fused_linear_gelu_slope_cpu>()
      .cuda<fused_linear_gelu_slope_cuda>();
}
