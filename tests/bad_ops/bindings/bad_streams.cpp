// Class 8: the CUDA kernel ignores the current stream.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_streams_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_streams_cpu(const Tensor& x) { return copied("bad_streams", x); }

Tensor bad_streams_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise("bad_streams", x);
  Tensor flat = empty({x.sizes().begin(), x.sizes().end()}, x);
  launch("bad_streams", x,
         [&](cudaStream_t stream) { return bad_streams_launch(raw(flat, dense), stream); });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_streams(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_streams_cpu>()
      .cuda<bad_streams_cuda>();
}
