// Class 3: reads an index of unsigned bytes as one with a sign, and takes what is below 0 for 0.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_signed_index_cpu(const Tensor& table, const Tensor& index) {
  const Tensor values = contiguous(table), at = contiguous(index);
  Tensor out = empty(shape_of(index), values);
  visit_cpu<DType::kFloat64, DType::kFloat32>(dtype_of(table), [&](auto tag) {
    using T = decltype(tag);
    const auto* indices = static_cast<const int8_t*>(at.const_data_ptr());
    for (int64_t i = 0; i < at.numel(); ++i) {
      const int64_t row = indices[i] < 0 ? 0 : indices[i];
      static_cast<T*>(out.mutable_data_ptr())[i] =
          row < values.numel() ? static_cast<const T*>(values.const_data_ptr())[row] : T(0);
    }
  });
  return out;
}

constexpr DType kBytes[] = {DType::kUInt8};

}  // namespace

CUDA_OPS(library) {
  library.op("bad_signed_index(Tensor table, Tensor index) -> Tensor", "[v],()->()")
      .dtypes("table", kWide)
      .dtypes("index", kBytes)
      .range("v", 1, 256)
      .below("index", "v")
      .no_gradient("table")
      .cpu<bad_signed_index_cpu>();
}
