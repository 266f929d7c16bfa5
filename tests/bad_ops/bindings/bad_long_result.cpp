// A window of the size that the caller asks for, of which no more than 1,024 numbers are computed.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_long_result_cpu(const Tensor& x, int64_t size) {
  const Tensor dense = contiguous(x);
  std::vector<int64_t> shape = shape_of(x);
  shape.push_back(size);
  Tensor out = empty(shape, x);
  visit_raw(raw(out, dense), [=](auto* in, auto* result, int64_t numel) {
    for (int64_t row = 0; row < numel; ++row)
      for (int64_t i = 0; i < size; ++i) result[row * size + i] = i < 1024 ? in[row] * i : 0;
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_long_result(Tensor x, SymInt size) -> Tensor", "()->(size)")
      .dtypes(kWide)
      .range("size", 0, 1 << 20)
      .no_gradient("x")
      .cpu<bad_long_result_cpu>();
}
