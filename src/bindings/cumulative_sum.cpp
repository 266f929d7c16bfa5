// cumulative_sum(x): sums up to each element along a dim.
#include "binding.h"
#include "by_torch.h"
#include "scan/scan_binding.h"
#include "workspace.h"

using namespace cuda_ops;

int64_t cumulative_sum_workspace(const Scan& problem);
cudaError_t cumulative_sum_launch(const Scan& problem, cudaStream_t stream);

namespace {

Tensor cumulative_sum_cpu(const Tensor& x, int64_t dim, bool reverse) {
  return scanned(x, dim, reverse, scan_cpu);
}

Tensor cumulative_sum_by_torch(const Tensor& x, int64_t dim, bool reverse) {
  const std::vector<int64_t> along{checked_dim(x, dim)};
  Tensor out = empty_elementwise(scan_result(dtype_of(x)), x);
  if (x.numel() == 0) return out;
  const auto turned = [&](const Tensor& t) {
    return reverse ? call<Tensor>("aten::flip", "", t, along) : t;
  };
  const std::optional<ScalarType> promoted;
  write_rounded(out, turned(call<Tensor>("aten::cumsum", "", turned(x), along[0], promoted)));
  return out;
}

Tensor cumulative_sum_cuda(const Tensor& x, int64_t dim, bool reverse) {
  return scanned(x, dim, reverse, [&](Scan& p) {
    launch(x, [&](cudaStream_t stream) {
      const Workspace workspace(cumulative_sum_workspace(p), x);
      p.workspace = workspace.data();
      return cumulative_sum_launch(p, stream);
    });
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("cumulative_sum(Tensor x, int dim=-1, bool reverse=False) -> Tensor", "")
      .dtypes(kScanned)
      .doc(R"(Cumulative sum along a dim: each element with all before it, or after it with reverse.

The order of additions depends only on sizes, strides, alignment and the GPU, so the same call gives
the same bits every time. The gradient is the cumulative sum from the other end.

Shapes: x of any shape and strides; the result has its shape, and its layout if x is dense, else it
is contiguous. Where the dims before or after the dim do not lie in equal steps, or a row's elements
are not adjacent, x is copied first.
Dtypes: float64, float32, float16, bfloat16, int64 or int32; the result has the dtype of x, that of
int32 is int64. Sums run in float64 for float64, in float32 for the other floating dtypes, and each
result is rounded once; those of integers wrap around. Under autocast it runs in float32.
Memory: a line that no block holds, from 32 KB of results on along the last dim, needs two sums and
a word for each part of up to 32 KB along the last dim, or 64 KB along another.
Errors: RuntimeError for any other dtype, or a dim that x does not have.
Formula: out[i] = sum over k <= i of x[k], as torch.cumsum(x, dim); with reverse, over k >= i.

Example:
>>> cuda_ops.cumulative_sum(torch.tensor([3, 1, 2]))
tensor([3, 4, 6]))")
      .cpu<cumulative_sum_cpu, cumulative_sum_by_torch>()
      .cuda<cumulative_sum_cuda>();
}
