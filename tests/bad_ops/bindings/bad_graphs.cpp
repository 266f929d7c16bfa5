// Class 10: the launcher waits for its kernel.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_graphs_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_graphs_cpu(const Tensor& x) { return copied("bad_graphs", x); }

Tensor bad_graphs_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise("bad_graphs", x);
  Tensor flat = empty({x.sizes().begin(), x.sizes().end()}, x);
  launch("bad_graphs", x,
         [&](cudaStream_t stream) { return bad_graphs_launch(raw(flat, dense), stream); });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_graphs(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_graphs_cpu>()
      .cuda<bad_graphs_cuda>();
}
