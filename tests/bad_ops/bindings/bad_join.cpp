// Class 8: a stream of its own that waits, and is not waited for.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_join_launch(const Raw& problem, int64_t cols, cudaStream_t stream);

namespace {

Tensor bad_join_cpu(const Tensor& x) { return copied(x); }

Tensor bad_join_cuda(const Tensor& x) {
  Tensor out = empty_elementwise(x);
  const auto launcher = [](const Raw& problem, cudaStream_t stream) {
    return bad_join_launch(problem, 1, stream);
  };
  if (!x.is_contiguous()) return flattened(x, launcher);
  launch(x, [&](cudaStream_t stream) { return launcher(raw(out, x), stream); });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_join(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_join_cpu>()
      .cuda<bad_join_cuda>();
}
