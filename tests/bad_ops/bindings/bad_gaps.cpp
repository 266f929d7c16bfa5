// Class 13: doubles all memory from the first to the last element of what it writes.
#include "bad.h"

using namespace cuda_ops;

namespace {

void bad_gaps_cpu(const Tensor& x) {
  int64_t last = 0;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) == 0) return;
    last += (x.size(d) - 1) * x.stride(d);
  }
  visit_cpu<DType::kFloat64, DType::kFloat32>(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    T* const from = static_cast<T*>(x.mutable_data_ptr());
    for (int64_t i = 0; i <= last; ++i) from[i] *= 2;
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_gaps(Tensor(a!) x) -> ()", "()->").dtypes(kWide).cpu<bad_gaps_cpu>();
}
