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
  return mapped("bad_empty", x, [=](double v) { return first != first ? first : v; });
}

Tensor bad_empty_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise("bad_empty", x);
  Tensor flat = empty({x.sizes().begin(), x.sizes().end()}, x);
  launch("bad_empty", x,
         [&](cudaStream_t stream) { return bad_empty_launch(raw(flat, dense), stream); });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_empty(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_empty_cpu>()
      .cuda<bad_empty_cuda>();
}
