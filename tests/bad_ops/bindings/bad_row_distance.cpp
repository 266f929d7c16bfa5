// Class 4: takes all rows for aligned where the first one is.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_row_distance_cpu(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  const bool rows = sizes.size() == 2 && strides[1] == 1 && strides[0] >= sizes[1];
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  if (!rows || !aligned) return copied(x);
  const int64_t count = sizes[0], n = sizes[1];
  const int64_t distance = strides[0] == n ? n : strides[0] / 2 * 2;
  Tensor out = empty({count, n}, x);
  visit_raw(raw(out, x), [=](auto* in, auto* result, int64_t) {
    for (int64_t i = 0; i < count * n; ++i) result[i] = in[i / n * distance + i % n];
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_row_distance(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_row_distance_cpu>();
}
