// cub_sum(x), cub_sum_rows(x): CUB on contiguous tensors, with workspace from torch's allocator.
// cub::DeviceReduce for a single row, cub::DeviceSegmentedReduce for several.
#include "cub_sum.h"

#include "binding.h"

using namespace cuda_ops;

cudaError_t cub_sum_launch(CubSum& problem, cudaStream_t stream);

namespace {

void run(const Tensor& x, CubSum problem) {
  if (!x.is_contiguous()) refuse("x", "a contiguous tensor", "another layout");
  launch(x, [&](cudaStream_t stream) { return cub_sum_launch(problem, stream); });
  const Tensor workspace = empty({int64_t(problem.workspace_bytes)}, DType::kUInt8, x);
  problem.workspace = workspace.mutable_data_ptr();
  launch(x, [&](cudaStream_t stream) { return cub_sum_launch(problem, stream); });
}

Tensor cub_sum(const Tensor& x) {
  Tensor out = empty({}, x);
  run(x, {dtype_of(x), x.const_data_ptr(), out.mutable_data_ptr(), 1, x.numel()});
  return out;
}

Tensor cub_sum_rows(const Tensor& x) {
  const auto sizes = x.sizes();
  Tensor out = empty({sizes.begin(), sizes.end() - 1}, x);
  run(x, {dtype_of(x), x.const_data_ptr(), out.mutable_data_ptr(), out.numel(), x.size(-1)});
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("cub_sum(Tensor x) -> Tensor", "").dtypes(kFloating).cuda<cub_sum>();
  library.op("cub_sum_rows(Tensor x) -> Tensor", "(n)->()").dtypes(kFloating).cuda<cub_sum_rows>();
}
