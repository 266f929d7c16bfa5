// Class 7: takes numbers that its reference refuses.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_refusal_cpu(const Tensor& x, int64_t times) {
  return elementwise_cpu([](double v, double t) { return v * t; }, x, double(times));
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_refusal(Tensor x, int times=1) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_refusal_cpu>();
}
