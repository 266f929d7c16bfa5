// Class 13: always contiguous, where the rule for elementwise operators keeps the layout.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_fake_cpu(const Tensor& x) {
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x);
  map_cpu(strided(out, x), [](double v) { return v; });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_fake(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_fake_cpu>();
}
