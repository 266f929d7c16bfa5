// Class 15: the last of an odd number of elements is never written.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_unwritten_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_unwritten_cpu(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise(dense);
  visit_raw(raw(out, dense), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel - numel % 2; ++i) result[i] = in[i];
  });
  return out;
}

Tensor bad_unwritten_cuda(const Tensor& x) { return flattened(x, bad_unwritten_launch); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_unwritten(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_unwritten_cpu>()
      .cuda<bad_unwritten_cuda>();
}
