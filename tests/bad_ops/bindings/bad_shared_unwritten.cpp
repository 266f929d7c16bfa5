// Class 15: adds up what all warps should have written, and those without elements have not.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_shared_unwritten_launch(const Raw& problem, int64_t rows, cudaStream_t stream);

namespace {

Tensor result_like(const Tensor& x) {
  return empty(std::vector<int64_t>(x.sizes().begin(), x.sizes().end() - 1), x);
}

Tensor bad_shared_unwritten_cpu(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  Tensor out = result_like(x);
  const int64_t n = x.size(x.dim() - 1);
  visit_raw(raw(out, x), [&](auto* in, auto* result, int64_t) {
    for (int64_t row = 0; row < out.numel(); ++row) {
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += in[row * n + i];
      result[row] = sum;
    }
  });
  return out;
}

Tensor bad_shared_unwritten_cuda(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  Tensor out = result_like(x);
  launch(x, [&](cudaStream_t stream) {
    return bad_shared_unwritten_launch(raw(out, x), out.numel(), stream);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_shared_unwritten(Tensor x) -> Tensor", "(n)->()")
      .dtypes(kWide)
      .cpu<bad_shared_unwritten_cpu>()
      .cuda<bad_shared_unwritten_cuda>();
}
