// Class 12: looks at the first element, also where there is none; the kernel gets 0 blocks.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_empty_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_empty_cpu(const Tensor& x) {
  double first = 0;
  visit_raw(raw(x, x), [&](auto* in, auto*, int64_t) {
    first = *const_cast<const volatile std::decay_t<decltype(*in)>*>(in);
  });
  return mapped(x, [=](double v) { return first != first ? first : v; });
}

Tensor bad_empty_cuda(const Tensor& x) { return flattened(x, bad_empty_launch); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_empty(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_empty_cpu>()
      .cuda<bad_empty_cuda>();
}
