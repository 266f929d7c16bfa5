// The backward of a nearest-neighbor resampling finds the neighbor with a distance in float32,
// the forward by dividing whole numbers: for some pairs of sizes, such as 26 and 22, they differ.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor resized(const Tensor& x, int64_t size) {
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = size;
  return empty(shape, x);
}

Tensor bad_gradient_size_cpu(const Tensor& x, int64_t size) {
  const Tensor dense = contiguous(x);
  const int64_t n = x.sizes().back(), rows = x.numel() / n;
  Tensor out = resized(x, size);
  visit_cpu<DType::kFloat64, DType::kFloat32>(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    const auto* in = static_cast<const T*>(dense.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < size; ++i) *to++ = in[row * n + i * n / size];
  });
  return out;
}

Tensor bad_gradient_size_backward_cpu(const Tensor& grad_out, const Tensor& x, int64_t size) {
  const Tensor dense = contiguous(grad_out);
  const int64_t n = x.sizes().back(), rows = x.numel() / n;
  Tensor grad_x = resized(x, n);
  const float distance = static_cast<float>(n) / static_cast<float>(size);
  visit_cpu<DType::kFloat64, DType::kFloat32>(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    const auto* in = static_cast<const T*>(dense.const_data_ptr());
    auto* to = static_cast<T*>(grad_x.mutable_data_ptr());
    std::fill(to, to + rows * n, T(0));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < size; ++i) {
        const auto at = static_cast<int64_t>(static_cast<float>(i) * distance);
        to[row * n + std::min(at, n - 1)] += in[row * size + i];
      }
    }
  });
  return grad_x;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gradient_size(Tensor x, SymInt size) -> Tensor", "(n)->(size)")
      .dtypes(kWide)
      .range("n", 1, 1 << 20)
      .range("size", 0, 1 << 20)
      .cpu<bad_gradient_size_cpu>();
  library
      .op("bad_gradient_size_backward(Tensor grad_out, Tensor x, SymInt size) -> Tensor grad_x",
          "(s),(n)->(n)")
      .dtypes(kWide)
      .range("n", 1, 1 << 20)
      .cpu<bad_gradient_size_backward_cpu>();
}
