// Wrong for one of eight dtypes, and there for a matrix alone.
#include "bad.h"

using namespace cuda_ops;

namespace {

constexpr DType kMany[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                           DType::kInt64,   DType::kInt32,   DType::kInt16,   DType::kUInt8};

Tensor bad_one_dtype_cpu(const Tensor& x) {
  Tensor out = empty_elementwise(x);
  detail::check_torch(aoti_torch_copy_(out.get(), x.get(), 0), "copy the result");
  if (dtype_of(x) == DType::kInt16 && x.sizes().size() == 4 && x.numel() > 0) {
    ++*static_cast<int16_t*>(out.mutable_data_ptr());
  }
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_one_dtype(Tensor x) -> Tensor", "()->()").dtypes(kMany).cpu<bad_one_dtype_cpu>();
}
