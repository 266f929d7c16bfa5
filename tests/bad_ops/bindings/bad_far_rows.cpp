// Class 6: counts the elements before a row of the table in 32 bits.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_far_rows_launch(const Raw& problem, const int64_t* index, int64_t rows, int columns,
                                cudaStream_t stream);

namespace {

Tensor result(const Tensor& table, const Tensor& index) {
  std::vector<int64_t> shape = shape_of(index);
  shape.push_back(table.size(1));
  return empty(shape, table);
}

Tensor bad_far_rows_cpu(const Tensor& table_, const Tensor& index_) {
  const Tensor table = contiguous(table_), index = contiguous(index_);
  Tensor out = result(table, index);
  const int64_t columns = table.size(1), bytes = columns * size_of(dtype_of(table));
  const auto* from = static_cast<const char*>(table.const_data_ptr());
  const auto* rows = static_cast<const int64_t*>(index.const_data_ptr());
  for (int64_t i = 0; i < index.numel(); ++i) {
    char* const to = static_cast<char*>(out.mutable_data_ptr()) + i * bytes;
    if (rows[i] >= 0 && rows[i] < table.size(0)) {
      std::memcpy(to, from + rows[i] * bytes, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
  return out;
}

Tensor bad_far_rows_cuda(const Tensor& table_, const Tensor& index_) {
  const Tensor table = contiguous(table_), index = contiguous(index_);
  Tensor out = result(table, index);
  const auto* rows = static_cast<const int64_t*>(index.const_data_ptr());
  const Raw problem{dtype_of(table), table.const_data_ptr(), out.mutable_data_ptr(), out.numel()};
  launch(table, [&](cudaStream_t stream) {
    return bad_far_rows_launch(problem, rows, table.size(0), static_cast<int>(table.size(1)),
                               stream);
  });
  return out;
}

constexpr DType kIndices[] = {DType::kInt64};

}  // namespace

CUDA_OPS(library) {
  library.op("bad_far_rows(Tensor table, Tensor index) -> Tensor", "[v,d],()->(d)")
      .dtypes(kWide)
      .dtypes("index", kIndices)
      .below("index", "v")
      .no_gradient("table")
      .cpu<bad_far_rows_cpu>()
      .cuda<bad_far_rows_cuda>();
}
