// Class 14: a row in shared memory, however long, and no check of the launch.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_shared_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_shared_cpu(const Tensor& x) {
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x);
  map_cpu(strided(out, x), [](double v) { return v; });
  return out;
}

Tensor bad_shared_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x);
  launch(x, [&](cudaStream_t stream) {
    return bad_shared_launch(raw(out, dense), x.size(x.dim() - 1), stream);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_shared(Tensor x) -> Tensor", "(n)->(n)")
      .dtypes(kWide)
      .cpu<bad_shared_cpu>()
      .cuda<bad_shared_cuda>();
}
