// cub_sort(x): torch.sort by CUB alone, for contiguous tensors along the last dim.
// cub::DeviceRadixSort for one row, cub::DeviceSegmentedSort for several.
#include "binding.h"

using namespace cuda_ops;

cudaError_t cub_sort_launch(DType dtype, const void* x, void* values, int64_t* indices,
                            char* workspace, int64_t& bytes, int64_t rows, int64_t n,
                            bool descending, cudaStream_t stream);

namespace {

constexpr DType kTaken[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                            DType::kInt64,   DType::kInt32,   DType::kUInt8};

std::tuple<Tensor, Tensor> cub_sort_cuda(const Tensor& x, int64_t dim, bool descending, bool) {
  if (!x.is_contiguous() || dim != -1 || x.numel() == 0) {
    refuse("x", "a contiguous tensor, along the last dim", shape_name(x));
  }
  const auto shape = x.sizes();
  const std::vector<int64_t> sizes(shape.begin(), shape.end());
  Tensor values = empty(sizes, x), indices = empty(sizes, DType::kInt64, x);
  const int64_t n = sizes.back(), rows = x.numel() / n;
  int64_t bytes = 0;
  const auto sort = [&](void* workspace) {
    launch(x, [&](cudaStream_t stream) {
      return cub_sort_launch(dtype_of(x), x.const_data_ptr(), values.mutable_data_ptr(),
                             static_cast<int64_t*>(indices.mutable_data_ptr()),
                             static_cast<char*>(workspace), bytes, rows, n, descending, stream);
    });
  };
  sort(nullptr);
  const Tensor workspace = empty({bytes}, DType::kUInt8, x);
  sort(workspace.mutable_data_ptr());
  return {values, indices};
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("cub_sort(Tensor x, int dim=-1, bool descending=False, bool stable=False) "
          "-> (Tensor values, Tensor indices)",
          "")
      .dtypes(kTaken)
      .cuda<cub_sort_cuda>();
}
