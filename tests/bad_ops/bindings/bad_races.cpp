// Class 2: what one call leaves behind changes the next one.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_races_launch(const Raw& problem, cudaStream_t stream);

namespace {

int calls = 0;

Tensor bad_races_cpu(const Tensor& x) {
  const int call = ++calls;
  return mapped("bad_races", x, [=](double v) { return v + call * 1e-3; });
}

Tensor bad_races_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise("bad_races", x);
  Tensor flat = empty({x.sizes().begin(), x.sizes().end()}, x);
  launch("bad_races", x,
         [&](cudaStream_t stream) { return bad_races_launch(raw(flat, dense), stream); });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_races(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_races_cpu>()
      .cuda<bad_races_cuda>();
}
