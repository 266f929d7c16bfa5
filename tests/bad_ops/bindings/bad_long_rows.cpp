// A buffer of 4,096 numbers for a row, and the rest of a longer one left out.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_long_rows_cpu(const Tensor& x) {
  const Tensor dense = contiguous(x);
  const auto sizes = dense.sizes();
  const int64_t n = sizes.back();
  Tensor out = empty({sizes.begin(), sizes.end() - 1}, dense);
  const int64_t rows = out.numel();
  visit_raw(raw(out, dense), [=](auto* in, auto* result, int64_t) {
    for (int64_t row = 0; row < rows; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < n && i < 4096; ++i) sum += in[row * n + i];
      result[row] = sum;
    }
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_long_rows(Tensor x) -> Tensor", "(n)->()").dtypes(kWide).cpu<bad_long_rows_cpu>();
}
