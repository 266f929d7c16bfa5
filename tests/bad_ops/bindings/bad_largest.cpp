// Class 7: a mean of two that overflows.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_largest_cpu(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise(x), flat = empty({x.sizes().begin(), x.sizes().end()}, x);
  visit_raw(raw(flat, dense), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = (in[i] + in[i]) / 2;
  });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_largest(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_largest_cpu>();
}
