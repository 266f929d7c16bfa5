// Class 11: the kernel reads pairs wherever the number of elements is even.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_alignment_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_alignment_cpu(const Tensor& x) { return copied("bad_alignment", x); }

Tensor bad_alignment_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise("bad_alignment", x);
  Tensor flat = empty({x.sizes().begin(), x.sizes().end()}, x);
  launch("bad_alignment", x,
         [&](cudaStream_t stream) { return bad_alignment_launch(raw(flat, dense), stream); });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_alignment(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_alignment_cpu>()
      .cuda<bad_alignment_cuda>();
}
