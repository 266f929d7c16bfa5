// Class 3: reads the right neighbor of the last element too.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_bounds_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_bounds_cpu(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty_elementwise(x), flat = empty({x.sizes().begin(), x.sizes().end()}, x);
  visit_raw(raw(flat, dense), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = in[i + 1] > 0 ? in[i + 1] : -in[i + 1];
  });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

Tensor bad_bounds_cuda(const Tensor& x) { return flattened(x, bad_bounds_launch); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_bounds(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_bounds_cpu>()
      .cuda<bad_bounds_cuda>();
}
