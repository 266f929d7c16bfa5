// Its public function, in the plugin, draws one key for all calls.
#include "bad.h"
#include "random_binding.h"

using namespace cuda_ops;

namespace {

Tensor bad_draws_cpu(const Tensor& x, const Tensor& key) {
  return random_cpu([](const Draw& draw, double v) { return v + draw.uniform(); }, key, x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_draws(Tensor x, Tensor key) -> Tensor", "(),[2]->()")
      .dtypes(kWide)
      .random("key")
      .cpu<bad_draws_cpu>();
}
