// Class 7: a row of -inf alone, as a mask leaves it, gives NaN.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_hidden_rows_cpu(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  Tensor out = empty(std::vector<int64_t>(x.sizes().begin(), x.sizes().end() - 1), x);
  const int64_t n = x.size(x.dim() - 1);
  visit_raw(raw(out, x), [&](auto* in, auto* result, int64_t) {
    for (int64_t row = 0; row < out.numel(); ++row) {
      double most = -INFINITY, sum = 0;
      for (int64_t i = 0; i < n; ++i) most = std::fmax(most, in[row * n + i]);
      const double base = most == INFINITY ? 0 : most;
      for (int64_t i = 0; i < n; ++i) sum += std::exp(in[row * n + i] - base);
      result[row] = base + std::log(sum);
    }
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_hidden_rows(Tensor x) -> Tensor", "(n)->()")
      .dtypes(kWide)
      .at_least("n", 1)
      .cpu<bad_hidden_rows_cpu>();
}
