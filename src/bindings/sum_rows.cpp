// sum_rows(x): sums over the last dim.
#include "binding.h"
#include "by_torch.h"
#include "reduce/reduce_binding.h"
#include "reduce/reduce_cpu.h"
#include "points_binding.h"

using namespace cuda_ops;

int64_t sum_rows_partials(const RowSums& problem);
cudaError_t sum_rows_launch(const RowSums& problem, cudaStream_t stream);

namespace {

Tensor empty_sums(const Tensor& x) {
  const auto sizes = x.sizes();
  return empty({sizes.begin(), sizes.end() - 1}, x);
}

RowSums sums_of(const Tensor& out, const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return {points_of(x, last), x.size(last), x.stride(last), out.mutable_data_ptr(), nullptr};
}

Tensor sum_rows_cpu(const Tensor& x) {
  Tensor out = empty_sums(x);
  row_sums_cpu(sums_of(out, x));
  return out;
}

Tensor sum_rows_by_torch(const Tensor& x) {
  Tensor out = empty_sums(x);
  sums_of(out, x);  // refuses what the kernel does
  sum_by_torch(x, {-1}, out);
  return out;
}

Tensor sum_rows_cuda(const Tensor& x) {
  Tensor out = empty_sums(x);
  RowSums problem = sums_of(out, x);
  use_choice(problem);
  launch(x, [&](cudaStream_t stream) {
    const int64_t count = sum_rows_partials(problem);
    // Freed when this returns: torch's allocator gives it to later work of this stream only.
    const Tensor partials = count > 0 ? empty({count}, DType::kFloat64, x) : out;
    problem.partials = partials.mutable_data_ptr();
    return sum_rows_launch(problem, stream);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("sum_rows(Tensor x) -> Tensor", "(n)->()")
      .dtypes(kFloating)
      .linear("x")
      .doc(R"(Sum over the last dim.

The order of additions depends only on sizes, strides, alignment, the GPU and a choice that tuning
has made, on a CPU on its threads, so the same call gives the same bits every time; another choice
may round otherwise. The gradient is a broadcast view, which takes no memory.

Shapes: x (..., N) of any strides; the result (...) is contiguous. N = 0 gives zeros.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. Sums run in float64
for float64 and in float32 for the others, and are rounded once. Under autocast it runs in float32.
Errors: RuntimeError for any other dtype or no dims.
Formula: out = sum over n of x[..., n], as torch.sum(x, -1).

Example:
>>> cuda_ops.sum_rows(torch.ones(2, 5))
tensor([5., 5.]))")
      .cpu<sum_rows_cpu, sum_rows_by_torch>()
      .cuda<sum_rows_cuda>();
}
