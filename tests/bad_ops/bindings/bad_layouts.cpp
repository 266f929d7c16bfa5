// Class 4: walks through memory as if the input were contiguous.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_layouts_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_layouts_cpu(const Tensor& x) {
  Tensor out = empty_elementwise(x);
  visit_raw(raw(out, x), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = in[i];
  });
  return out;
}

Tensor bad_layouts_cuda(const Tensor& x) {
  Tensor out = empty_elementwise(x);
  launch(x, [&](cudaStream_t stream) { return bad_layouts_launch(raw(out, x), stream); });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_layouts(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_layouts_cpu>()
      .cuda<bad_layouts_cuda>();
}
