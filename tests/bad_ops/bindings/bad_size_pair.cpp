// A nearest-neighbor resampling that multiplies by a distance in float32, in place of dividing
// whole numbers: for some pairs of sizes, such as 26 and 22, it takes the neighbor.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_size_pair_cpu(const Tensor& x, int64_t size) {
  const Tensor dense = contiguous(x);
  const int64_t n = x.sizes().back(), rows = x.numel() / n;
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = size;
  Tensor out = empty(shape, x);
  const float distance = static_cast<float>(n) / static_cast<float>(size);
  visit_cpu<DType::kFloat64, DType::kFloat32>(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    const auto* in = static_cast<const T*>(dense.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < size; ++i) {
        const auto at = static_cast<int64_t>(static_cast<float>(i) * distance);
        *to++ = in[row * n + std::min(at, n - 1)];
      }
    }
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_size_pair(Tensor x, SymInt size) -> Tensor", "(n)->(size)")
      .dtypes(kWide)
      .range("n", 1, 1 << 20)
      .range("size", 0, 1 << 20)
      .no_gradient("x")
      .cpu<bad_size_pair_cpu>();
}
