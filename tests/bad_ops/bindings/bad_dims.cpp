// Takes dims for counted from the start as soon as the first of them is.
#include <algorithm>
#include <vector>

#include "bad.h"

using namespace cuda_ops;

namespace {

// y = x with the given dims turned around: x.flip(dims).
Tensor bad_dims_cpu(const Tensor& x, const std::vector<int64_t>& dims) {
  const Tensor dense = contiguous(x);
  const auto sizes = x.sizes();
  const auto rank = static_cast<int64_t>(sizes.size());
  std::vector<bool> turned(sizes.size());
  for (int64_t d : dims) {
    if (d < -rank || d >= rank) refuse("dims", "dims of x", std::to_string(d));
    const int64_t at = d < 0 && dims[0] < 0 ? d + rank : std::max<int64_t>(d, 0);
    if (turned[at]) refuse("dims", "dims that differ", std::to_string(d));
    turned[at] = true;
  }
  Tensor out = empty({sizes.begin(), sizes.end()}, x);
  visit_raw(raw(out, dense), [&](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      int64_t rest = i, from = 0, step = 1;
      for (int64_t d = rank; d-- > 0;) {
        const int64_t at = rest % sizes[d];
        from += (turned[d] ? sizes[d] - 1 - at : at) * step;
        rest /= sizes[d], step *= sizes[d];
      }
      result[i] = in[from];
    }
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_dims(Tensor x, int[] dims) -> Tensor", "").dtypes(kWide).cpu<bad_dims_cpu>();
}
