// Class 7: an int argument is kept in 32 bits.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_integer_cpu(const Tensor& x, int64_t shift) {
  return elementwise_cpu([](double v, double s) { return v + s; }, x, double(int32_t(shift)));
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_integer(Tensor x, int shift) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_integer_cpu>();
}
