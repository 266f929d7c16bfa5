// Class 2: all parts of a parallel loop share one row of scratch memory.
#include <algorithm>
#include <vector>

#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_parallel_cpu(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x);
  const int64_t n = x.size(x.dim() - 1), rows = n > 0 ? x.numel() / n : 0;
  std::vector<double> scratch(static_cast<size_t>(n));
  visit_raw(raw(out, x), [&](auto* in, auto* result, int64_t) {
    parallel_for(rows, 1 + 4096 / (n + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        std::copy(in + row * n, in + (row + 1) * n, scratch.begin());
        std::copy(scratch.begin(), scratch.end(), result + row * n);
      }
    });
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_parallel(Tensor x) -> Tensor", "(n)->(n)").dtypes(kWide).cpu<bad_parallel_cpu>();
}
