// Class 7: a maximum with 0 that loses NaN.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_numerics_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_numerics_cpu(const Tensor& x) {
  return mapped("bad_numerics", x, [](double v) { return v > 0 ? v : 0; });
}

Tensor bad_numerics_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise("bad_numerics", x);
  Tensor flat = empty({x.sizes().begin(), x.sizes().end()}, x);
  launch("bad_numerics", x,
         [&](cudaStream_t stream) { return bad_numerics_launch(raw(flat, dense), stream); });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_numerics(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_numerics_cpu>()
      .cuda<bad_numerics_cuda>();
}
