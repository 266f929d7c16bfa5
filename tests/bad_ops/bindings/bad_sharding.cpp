// A wrong sharding rule, in its plugin: rows that are summed are cut in two.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_sharding_cpu(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x);
  const int64_t cols = x.size(x.dim() - 1);
  visit_raw(raw(out, dense), [=](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = in[i] + (i % cols ? result[i - 1] : 0);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_sharding(Tensor x) -> Tensor", "(n)->(n)").dtypes(kWide).cpu<bad_sharding_cpu>();
}
