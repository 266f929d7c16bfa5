// reduce_sum(x): the sum of all elements.
#include "binding.h"
#include "by_torch.h"
#include "reduce/reduce_binding.h"
#include "reduce/reduce_cpu.h"
#include "points_binding.h"

using namespace cuda_ops;

int64_t reduce_sum_partials(const RowSums& problem);
cudaError_t reduce_sum_launch(const RowSums& problem, cudaStream_t stream);

namespace {

// Treats all points as rows along a dim of adjacent elements, if there is one.
RowSums rows_of(const Points& points, const Tensor& out) {
  RowSums p;
  p.out = out.mutable_data_ptr();
  p.rows.data = points.data;
  p.rows.dtype = points.dtype;
  p.n = points.numel > 0 ? 1 : 0;
  if (points.numel <= 1) return p;
  int along = 0;
  for (int d = 0; d < points.dims; ++d) {
    if (points.strides[d] == 1) along = d;
  }
  p.n = points.sizes[along];
  p.stride = points.strides[along];
  for (int d = 0; d < points.dims; ++d) {
    if (d != along) p.rows.add_dim(points.sizes[d], points.strides[d]);
  }
  return p;
}

// Adds in row-major order, so that the layout does not change the sum.
Tensor reduce_sum_cpu(const Tensor& x) {
  Tensor out = empty({}, x);
  total_cpu(points_of(x), out.mutable_data_ptr());
  return out;
}

Tensor reduce_sum_by_torch(const Tensor& x) {
  Tensor out = empty({}, x);
  points_of(x);  // refuses what the kernel does
  sum_by_torch(x, {}, out);
  return out;
}

Tensor reduce_sum_cuda(const Tensor& x) {
  Tensor out = empty({}, x);
  RowSums problem = rows_of(in_memory_order(points_of(x)), out);
  use_choice(problem);
  launch(x, [&](cudaStream_t stream) {
    const int64_t count = reduce_sum_partials(problem);
    // Freed when this returns: torch's allocator gives it to later work of this stream only.
    const Tensor partials = count > 0 ? empty({count}, DType::kFloat64, x) : out;
    problem.partials = partials.mutable_data_ptr();
    return reduce_sum_launch(problem, stream);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("reduce_sum(Tensor x) -> Tensor", "()->[]")
      .dtypes(kFloating)
      .linear("x")
      .doc(R"(Sum of all elements.

The order of additions depends only on sizes, strides, alignment, the GPU and a choice that tuning
has made, on a CPU on its threads, so the same call gives the same bits every time; another choice
may round otherwise. The gradient is a broadcast view, which takes no memory.

Shapes: x of any shape and strides; the result has no dims. An empty x gives 0.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. Sums run in float64
for float64 and in float32 for the others, and are rounded once. Under autocast it runs in float32.
Errors: RuntimeError for any other dtype.
Formula: the sum of x[i] over all i, as torch.sum(x).

Example:
>>> cuda_ops.reduce_sum(torch.arange(10.0))
tensor(45.))")
      .cpu<reduce_sum_cpu, reduce_sum_by_torch>()
      .cuda<reduce_sum_cuda>();
}
