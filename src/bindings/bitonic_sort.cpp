// bitonic_sort(x): elements in order along a dim, and where they were.
#include "binding.h"
#include "sort/sort_binding.h"
#include "workspace.h"

using namespace cuda_ops;

cudaError_t bitonic_sort_plan(const SortRows& problem, SortConfig& config);
cudaError_t bitonic_sort_launch(const SortRows& problem, const SortConfig& config,
                                cudaStream_t stream);

namespace {

// Kernels hold the index within a row in 32 bits.
constexpr int64_t kLongest = (int64_t(1) << 32) - 1;

struct Sorted {
  Tensor values, indices;
  SortRows problem;

  Sorted(const Tensor& x, int64_t dim, bool descending)
      : values(empty_rows(x, dim, x.dim() > 0 ? x.size(dim) : 1, dtype_of(x))),
        indices(empty_rows(x, dim, x.dim() > 0 ? x.size(dim) : 1, DType::kInt64)),
        problem(rows_along(x, dim, descending)) {
    problem.built_for_hopper = built_for_hopper();
    problem.values = values.mutable_data_ptr();
    problem.indices = static_cast<int64_t*>(indices.mutable_data_ptr());
  }
};

std::tuple<Tensor, Tensor> bitonic_sort_cpu(const Tensor& x, int64_t dim, bool descending, bool) {
  dim = checked_dim(x, dim);
  Sorted out(x, dim, descending);
  sort_rows_cpu(out.problem, x.dim() > 0 ? x.stride(dim) : 1, out.problem.n);
  return {out.values, out.indices};
}

std::tuple<Tensor, Tensor> bitonic_sort_cuda(const Tensor& x, int64_t dim, bool descending, bool) {
  dim = checked_dim(x, dim);
  const Tensor rows = with_rows(x, dim);
  Sorted out(rows, dim, descending);
  if (out.problem.n > kLongest) {
    refuse("x", "fewer than 2^32 elements along the dim", "shape " + shape_name(x));
  }
  if (x.numel() == 0) return {out.values, out.indices};
  SortConfig config;
  launch(x, [&](cudaStream_t) { return bitonic_sort_plan(out.problem, config); });
  const int64_t size = size_of(dtype_of(x));
  const Workspace workspace(sort_workspace_bytes(config, out.problem.n, size), x);
  out.problem.workspace = workspace.data();
  launch(x, [&](cudaStream_t s) { return bitonic_sort_launch(out.problem, config, s); });
  return {out.values, out.indices};
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("bitonic_sort(Tensor x, int dim=-1, bool descending=False, bool stable=False) "
          "-> (Tensor values, Tensor indices)",
          "")
      .dtypes(kSortable)
      .doc(R"(The elements of x in order along a dim, and their indices there: torch.sort.

The order is that of torch.sort: NaN is larger than any number, and -0 equals 0. The sort is always
stable, so `stable` changes nothing. Values are bit for bit those of x. The same call gives the same
bits every time.

Shapes: x of any shape and strides; both results have its shape. In memory the elements along the
dim are adjacent, and the other dims are in row-major order.
Dtypes: float64, float32, float16, bfloat16, uint8, int8, int16, int32, int64 or bool; values have
the dtype of x, indices are int64. Values have a gradient.
Memory: rows of up to 32768 elements (22528 for float64 and int64) need nothing beyond the results,
nor do a few rows of up to 131072 (65536) on Hopper. Longer rows, or more of them, need the size of
the values and half the size of the indices, for at most 2^28 elements or one row at a time.
Errors: RuntimeError for any other dtype, a dim that x does not have, or 2^32 or more elements along
the dim.
Formula: values[..., i] = x[..., indices[..., i]], values[..., i] <= values[..., i + 1].

Example:
>>> cuda_ops.bitonic_sort(torch.tensor([3, 1, 2]))
(tensor([1, 2, 3]), tensor([1, 2, 0])))")
      .cpu<bitonic_sort_cpu>()
      .cuda<bitonic_sort_cuda>();
}
