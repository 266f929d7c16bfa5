// Class 14: a thread for each element of a row, and no check of the launch.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_block_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_block_cpu(const Tensor& x) {
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x);
  map_cpu(strided(out, x), [](double v) { return v; });
  return out;
}

Tensor bad_block_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x);
  launch(x, [&](cudaStream_t stream) {
    return bad_block_launch(raw(out, dense), x.size(x.dim() - 1), stream);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_block(Tensor x) -> Tensor", "(n)->(n)")
      .dtypes(kWide)
      .cpu<bad_block_cpu>()
      .cuda<bad_block_cuda>();
}
