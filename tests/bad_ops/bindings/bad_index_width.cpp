// Class 6: computes offsets in 32 bits.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_index_width_launch(const Strided<1>& problem, cudaStream_t stream);

namespace {

Tensor bad_index_width_cpu(const Tensor& x) {
  Tensor out = empty_elementwise(x);
  const auto problem = strided(out, x);
  visit_floating_cpu(problem.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t i = 0; i < problem.numel; ++i) {
      const auto at = problem.offsets_at(i);
      const auto from = static_cast<int32_t>(at[1]);
      static_cast<T*>(problem.operands[0].data)[at[0]] =
          static_cast<const T*>(problem.operands[1].data)[from];
    }
  });
  return out;
}

Tensor bad_index_width_cuda(const Tensor& x) {
  Tensor out = empty_elementwise(x);
  launch(x, [&](cudaStream_t stream) { return bad_index_width_launch(strided(out, x), stream); });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_index_width(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_index_width_cpu>()
      .cuda<bad_index_width_cuda>();
}
