// A plainly wrong result.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_result_cpu(const Tensor& x) {
  return mapped(x, [](double v) { return v * 1.001; });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_result(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_result_cpu>();
}
