// gelu(x @ weight^T + bias) in one pass, the same with the values before gelu kept,
// and what its gradient needs of them when they were not.
#include "fused_linear_gelu.h"

#include "gelu.h"
#include "tensor_matmul.h"

using namespace cuda_ops;

cudaError_t fused_linear_gelu_launch(const LinearGelu& problem, cudaStream_t stream);

namespace {

using MaybeTensor = std::optional<Tensor>;

// The arguments of one call, outputs allocated. Kernels read neighbours of the bias
// and of grad_out, so those are dense.
struct Call {
  Tensor x, weight, out;
  MaybeTensor bias, grad_out, preactivation;
  std::vector<View> views;  // x, weight, bias or x, grad_out or x; of each one core dim

  Call(const char* op, const Tensor& x_, const Tensor& weight_, const MaybeTensor& bias_,
       const MaybeTensor& grad_out_, bool keep)
      : x(x_), weight(weight_) {
    if (bias_) bias = contiguous(*bias_);
    if (grad_out_) grad_out = contiguous(*grad_out_);
    View rows = weight;  // (..., O), each a line of I
    --rows.dims;
    rows.last_size = rows.sizes[rows.dims - 1];
    const View inputs[] = {x, rows, bias ? *bias : x, grad_out ? *grad_out : x};
    std::vector<int64_t> shape = detail::broadcast_shape(op, inputs, 1);
    shape.push_back(rows.last_size);
    out = empty(shape, x);
    if (keep) preactivation = empty(shape, x);
    views.assign(inputs, inputs + 4);
  }

  static const void* at(const MaybeTensor& tensor, int64_t offset) {
    if (!tensor) return nullptr;
    return static_cast<const char*>(View(*tensor).data) + offset * size_of(dtype_of(*tensor));
  }

  // One weight for all rows: the last two dims of x as matrices.
  bool is_one_product() const {
    if (weight.dim() != 2 || (bias && bias->dim() != 1) || x.dim() < 2) return false;
    for (int64_t d = 0; d < x.dim() - 1; ++d) {
      if (x.size(d) != out.size(d) || (grad_out && grad_out->size(d) != out.size(d))) return false;
    }
    return x.dim() == out.dim() && (!grad_out || grad_out->dim() == out.dim());
  }

  // Calls `run(problem)` until it returns false: once, or where weights or biases
  // differ, once for each row.
  template <class Run>
  void for_each_product(Run run) const {
    LinearGelu p;
    const Matrix w = transposed(weight);
    if (is_one_product()) {
      p.product = product(out, x, w);
      p.bias = at(bias, 0);
      p.grad_out = at(grad_out, 0);
      p.preactivation = const_cast<void*>(at(preactivation, 0));
      run(p);
      return;
    }
    const auto rows = strided({written(out)}, {views[0], views[1], views[2], views[3]}, 1);
    Matmul& one = p.product;
    one.m = 1;
    one.n = w.cols;
    one.k = w.rows;
    one.batch.dtype = rows.dtype;
    one.batch.numel = 1;
    one.out = {w.cols, 1};
    one.a = {w.rows, x.stride(x.dim() - 1)};
    one.b = w.strides;
    one.built_for_hopper = built_for_hopper();
    for (int64_t i = 0; i < rows.numel; ++i) {
      const auto offsets = rows.offsets_at(i);
      for (int k = 0; k < 3; ++k) {
        char* data = static_cast<char*>(rows.operands[k].data);
        one.batch.operands[k].data = data + offsets[k] * size_of(rows.dtype);
      }
      p.bias = at(bias, offsets[3]);
      p.grad_out = at(grad_out, offsets[4]);
      p.preactivation = const_cast<void*>(at(preactivation, offsets[0]));
      if (!run(p)) return;
    }
  }

  void run_cpu() const {
    for_each_product([](const LinearGelu& p) {
      multiply(p.product, [&](auto tag, int64_t row, std::vector<double>& sums) {
        using T = decltype(tag);
        const auto* bias = static_cast<const T*>(p.bias);
        const auto* grads = static_cast<const T*>(p.grad_out);
        auto* kept = static_cast<T*>(p.preactivation);
        for (size_t j = 0; j < sums.size(); ++j) {
          double& sum = sums[j];
          if (bias != nullptr) sum += static_cast<double>(bias[j]);
          if (kept != nullptr) kept[row + j] = static_cast<T>(sum);
          sum = grads != nullptr ? static_cast<double>(grads[row + j]) * gelu::first(sum)
                                 : gelu::value(sum);
        }
      });
      return true;
    });
  }

  void run_cuda(const char* op) const {
    launch(op, x, [&](cudaStream_t stream) {
      cudaError_t error = cudaSuccess;
      for_each_product([&](const LinearGelu& p) {
        error = fused_linear_gelu_launch(p, stream);
        return error == cudaSuccess;
      });
      return error;
    });
  }
};

// --- CPU ----------------------------------------------------------------------

Tensor fused_linear_gelu_cpu(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  const Call call("fused_linear_gelu", x, weight, bias, {}, false);
  call.run_cpu();
  return call.out;
}

std::tuple<Tensor, Tensor> fused_linear_gelu_keep_cpu(const Tensor& x, const Tensor& weight,
                                                      const MaybeTensor& bias) {
  const Call call("fused_linear_gelu_keep", x, weight, bias, {}, true);
  call.run_cpu();
  return {call.out, *call.preactivation};
}

Tensor fused_linear_gelu_slope_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                   const MaybeTensor& bias) {
  const Call call("fused_linear_gelu_slope", x, weight, bias, grad_out, false);
  call.run_cpu();
  return call.out;
}

// --- CUDA ---------------------------------------------------------------------

Tensor fused_linear_gelu_cuda(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  const Call call("fused_linear_gelu", x, weight, bias, {}, false);
  call.run_cuda("fused_linear_gelu");
  return call.out;
}

std::tuple<Tensor, Tensor> fused_linear_gelu_keep_cuda(const Tensor& x, const Tensor& weight,
                                                       const MaybeTensor& bias) {
  const Call call("fused_linear_gelu_keep", x, weight, bias, {}, true);
  call.run_cuda("fused_linear_gelu_keep");
  return {call.out, *call.preactivation};
}

Tensor fused_linear_gelu_slope_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                    const MaybeTensor& bias) {
  const Call call("fused_linear_gelu_slope", x, weight, bias, grad_out, false);
  call.run_cuda("fused_linear_gelu_slope");
  return call.out;
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("fused_linear_gelu(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
          "(i),(o,i),(o)->(o)")
      .dtypes(kFloating)
      .cpu<fused_linear_gelu_cpu>()
      .cuda<fused_linear_gelu_cuda>();
  library
      .op("fused_linear_gelu_keep(Tensor x, Tensor weight, Tensor? bias=None) -> (Tensor out, "
          "Tensor preactivation)",
          "(i),(o,i),(o)->(o),(o)")
      .dtypes(kFloating)
      .doc(
          R"(fused_linear_gelu, and x @ weight^T + bias beside it, from which gradients are cheaper.

Shapes: x (..., I), weight (O, I), bias (O) or None; out and preactivation (..., O) are contiguous.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError as in fused_linear_gelu.
Formula: that of fused_linear_gelu.)")
      .cpu<fused_linear_gelu_keep_cpu>()
      .cuda<fused_linear_gelu_keep_cuda>();
  library
      .op("fused_linear_gelu_slope(Tensor grad_out, Tensor x, Tensor weight, Tensor? bias=None) -> "
          "Tensor",
          "(o),(i),(o,i),(o)->(o)")
      .dtypes(kFloating)
      .doc(R"(grad_out * gelu'(x @ weight^T + bias), the product recomputed instead of kept.

Shapes: grad_out (..., O), x (..., I), weight (O, I), bias (O); the result (..., O) is contiguous.
Dtypes: float64, float32, float16 or bfloat16, the same for all.
Errors: RuntimeError as in fused_linear_gelu.
Formula: the chain rule for fused_linear_gelu.)")
      .cpu<fused_linear_gelu_slope_cpu>()
      .cuda<fused_linear_gelu_slope_cuda>();
}
