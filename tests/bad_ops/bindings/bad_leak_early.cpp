// A leak: 64 bytes for each call that finds nothing but zeros, and returns early.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_leak_early_cpu(const Tensor& x) {
  const Tensor dense = contiguous(x);
  const auto* bytes = static_cast<const char*>(dense.const_data_ptr());
  const int64_t count = dense.numel() * size_of(dtype_of(x));
  auto* scratch = static_cast<char*>(::operator new(64));
  bool all_zero = true;
  for (int64_t i = 0; i < count; ++i) all_zero = all_zero && bytes[i] == 0;
  if (all_zero) return copied(x);
  ::operator delete(scratch);
  return copied(x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_leak_early(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_leak_early_cpu>();
}
