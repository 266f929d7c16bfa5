// Its policy casts one of two arguments that must have the same dtype.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_policy_cpu(const Tensor& x, const Tensor& gate) {
  return elementwise_cpu([](double v, double g) { return v * g; }, x, gate);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_policy(Tensor x, Tensor gate) -> Tensor", "(),()->()")
      .dtypes(kFloating)
      .cpu<bad_policy_cpu>();
}
