// bitonic_topk(x, k): the k largest or smallest elements along a dim, in order.
#include "binding.h"
#include "compose.h"
#include "sort/sort_binding.h"
#include "sort/topk.h"
#include "workspace.h"

using namespace cuda_ops;

bool bitonic_topk_sorts_all(const TopkRows& problem);
int64_t bitonic_topk_workspace(const TopkRows& problem);
cudaError_t bitonic_topk_launch(const TopkRows& problem, cudaStream_t stream);

namespace {

// Checks k and returns how many are kept: a tensor without dims keeps its element, as in torch.
int64_t checked_k(const Tensor& x, int64_t dim, int64_t k) {
  const int64_t n = x.dim() > 0 ? x.size(dim) : 1;
  if (k < 0 || k > n) {
    refuse("k", "a number from 0 to the size of the dim, " + std::to_string(n), std::to_string(k));
  }
  return x.dim() > 0 ? k : 1;
}

struct Kept {
  Tensor values, indices;
  TopkRows problem;

  Kept(const Tensor& x, int64_t k, int64_t dim, bool largest)
      : values(empty_rows(x, dim, k, dtype_of(x))),
        indices(empty_rows(x, dim, k, DType::kInt64)),
        problem{rows_along(x, dim, largest), k} {
    problem.sort.values = values.mutable_data_ptr();
    problem.sort.indices = static_cast<int64_t*>(indices.mutable_data_ptr());
  }
};

// Sorts all and copies the first k.
void keep_by_sorting(Kept& out, const Tensor& x, int64_t k, int64_t dim, bool largest) {
  const auto [values, indices] =
      call<std::tuple<Tensor, Tensor>>("cuda_ops::bitonic_sort", "", x, dim, largest, true);
  for (const auto& [kept, sorted] :
       {std::tie(out.values, values), std::tie(out.indices, indices)}) {
    const Tensor first = call<Tensor>("aten::narrow", "", sorted, dim, int64_t(0), k);
    detail::check_torch(aoti_torch_copy_(kept.get(), first.get(), 0), "copy a tensor");
  }
}

std::tuple<Tensor, Tensor> bitonic_topk_cpu(const Tensor& x, int64_t k, int64_t dim, bool largest,
                                            bool) {
  dim = checked_dim(x, dim);
  k = checked_k(x, dim, k);
  Kept out(x, k, dim, largest);
  sort_rows_cpu(out.problem.sort, x.dim() > 0 ? x.stride(dim) : 1, k);
  return {out.values, out.indices};
}

std::tuple<Tensor, Tensor> bitonic_topk_cuda(const Tensor& x, int64_t k, int64_t dim, bool largest,
                                             bool) {
  dim = checked_dim(x, dim);
  k = checked_k(x, dim, k);
  const Tensor rows = with_rows(x, dim);
  Kept out(rows, k, dim, largest);
  SortRows& p = out.problem.sort;
  if (out.values.numel() == 0) return {out.values, out.indices};
  bool sorts_all = !topk_sorts(p.n, k) && (k > kMostKept || p.n > kTopkLongest);
  if (sorts_all) {
    launch(x, [&](cudaStream_t) {
      sorts_all = bitonic_topk_sorts_all(out.problem);
      return cudaSuccess;
    });
  }
  if (sorts_all) {
    keep_by_sorting(out, x, k, dim, largest);
    return {out.values, out.indices};
  }
  launch(x, [&](cudaStream_t stream) {
    const Workspace workspace(bitonic_topk_workspace(out.problem), x);
    p.workspace = workspace.data();
    return bitonic_topk_launch(out.problem, stream);
  });
  return {out.values, out.indices};
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("bitonic_topk(Tensor x, SymInt k, int dim=-1, bool largest=True, bool sorted=True) "
          "-> (Tensor values, Tensor indices)",
          "")
      .dtypes(kSortable)
      .calls("bitonic_sort")
      .doc(
          R"(The k largest or smallest elements of x along a dim, and their indices there: torch.topk.

The order is that of torch.topk: NaN is larger than any number. The result is always sorted, so
`sorted` changes nothing; equal elements keep their order, which torch does not promise. Values are
bit for bit those of x. The same call gives the same bits every time.

Shapes: x of any shape and strides; the results have k elements along the dim, which are adjacent in
memory, and the other dims are in row-major order. If x has no dims, the result is its element, even
for k = 0, as in torch.
Dtypes: float64, float32, float16, bfloat16, uint8, int8, int16, int32, int64 or bool; values have
the dtype of x, indices are int64. Values have a gradient.
Memory: none for rows of up to 256 elements, or of up to 1024 if k is above 32. Otherwise at most 18
bytes per kept element of each chunk of 1024, or of 32768 if k is above 64. Where k is a large part
of a row, bitonic_sort sorts all of x, and the first k are copied.
Errors: RuntimeError for any other dtype, a dim that x does not have, or a k below 0 or above its
size.
Formula: the first k of bitonic_sort(x, dim, descending=largest).

Example:
>>> cuda_ops.bitonic_topk(torch.tensor([3.0, 1.0, 2.0]), 2)
(tensor([3., 2.]), tensor([0, 2])))")
      .cpu<bitonic_topk_cpu>()
      .cuda<bitonic_topk_cuda>();
}
