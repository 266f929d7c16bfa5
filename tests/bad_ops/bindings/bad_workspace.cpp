// Class 3: a workspace for the blocks that are full, where there may be one more.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_workspace_launch(const Raw& problem, double* parts, cudaStream_t stream);

namespace {

Tensor bad_workspace_cpu(const Tensor& x) { return copied(x); }

Tensor bad_workspace_cuda(const Tensor& x) {
  const Tensor parts = empty({x.numel() / 256}, DType::kFloat64, x);
  return flattened(x, [&](const Raw& problem, cudaStream_t stream) {
    return bad_workspace_launch(problem, static_cast<double*>(parts.mutable_data_ptr()), stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_workspace(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_workspace_cpu>()
      .cuda<bad_workspace_cuda>();
}
