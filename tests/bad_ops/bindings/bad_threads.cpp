// Class 2: all calls work in one static buffer, without a lock.
#include <vector>

#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_threads_cpu(const Tensor& x) {
  static std::vector<double> buffer(1 << 20);
  const Tensor dense = contiguous(x);
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x);
  if (size_t(x.numel()) > buffer.size()) refuse("x", "at most 2^20 elements", "more");
  visit_raw(raw(out, dense), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) buffer[i] = in[i];
    for (int64_t i = 0; i < numel; ++i) result[i] = buffer[i];
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_threads(Tensor x) -> Tensor", "(n)->(n)").dtypes(kWide).cpu<bad_threads_cpu>();
}
