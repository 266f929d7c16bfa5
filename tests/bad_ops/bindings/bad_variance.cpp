// Class 7: the mean of squares less the square of the mean.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_variance_cpu(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  Tensor out = empty(std::vector<int64_t>(x.sizes().begin(), x.sizes().end() - 1), x);
  const int64_t n = x.size(x.dim() - 1);
  visit_raw(raw(out, x), [&](auto* in, auto* result, int64_t) {
    for (int64_t row = 0; row < out.numel(); ++row) {
      std::decay_t<decltype(*result)> sum = 0, squares = 0;
      for (int64_t i = 0; i < n; ++i) {
        sum += in[row * n + i];
        squares += in[row * n + i] * in[row * n + i];
      }
      result[row] = squares / n - sum / n * (sum / n);
    }
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_variance(Tensor x) -> Tensor", "(n)->()").dtypes(kWide).cpu<bad_variance_cpu>();
}
