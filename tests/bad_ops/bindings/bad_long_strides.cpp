// Class 4: takes long rows for rows of neighbors.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_long_strides_cpu(const Tensor& x) {
  const int64_t n = x.size(x.dim() - 1);
  Tensor out = empty(shape_of(x), x);
  if (n < 512 || x.dim() != 3) {
    map_cpu(strided(out, x), [](double v) { return v; });
    return out;
  }
  visit_raw(raw(out, x), [&](auto* in, auto* result, int64_t numel) {
    for (int64_t row = 0; row < numel / n; ++row) {
      const int64_t start = row / x.size(1) * x.stride(0) + row % x.size(1) * x.stride(1);
      for (int64_t i = 0; i < n; ++i) result[row * n + i] = in[start + i];
    }
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_long_strides(Tensor x) -> Tensor", "(n)->(n)")
      .dtypes(kWide)
      .cpu<bad_long_strides_cpu>();
}
