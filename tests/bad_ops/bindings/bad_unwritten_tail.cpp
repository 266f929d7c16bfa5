// Class 15: where there are several blocks of 64, the last one is only written if it is whole.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_unwritten_tail_cpu(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise(dense);
  visit_raw(raw(out, dense), [](auto* in, auto* result, int64_t numel) {
    const int64_t written = numel > 512 ? numel / 64 * 64 : numel;
    for (int64_t i = 0; i < written; ++i) result[i] = in[i];
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_unwritten_tail(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_unwritten_tail_cpu>();
}
