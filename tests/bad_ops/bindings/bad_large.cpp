// Counts in 16 bits, so all from element 65,536 on is lost.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_large_cpu(const Tensor& x) {
  if (contiguous(x).const_data_ptr() != x.const_data_ptr()) return copied(x);
  Tensor out = empty_elementwise(x);
  visit_raw(raw(out, x), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = i <= UINT16_MAX ? in[i] : 0;
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_large(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_large_cpu>();
}
