// Class 3: writes an element behind the result.
#include "bad.h"

using namespace cuda_ops;

namespace {

constexpr DType kFloats[] = {DType::kFloat32};

Tensor bad_behind_cpu(const Tensor& x) {
  if (contiguous(x).const_data_ptr() != x.const_data_ptr()) return copied(x);
  Tensor out = empty_elementwise(x);
  visit_raw(raw(out, x), [](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = in[i];
    if (numel % 4 == 1) result[numel] = 0;
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_behind(Tensor x) -> Tensor", "()->()").dtypes(kFloats).cpu<bad_behind_cpu>();
}
