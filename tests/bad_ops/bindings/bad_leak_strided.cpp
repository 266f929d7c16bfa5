// A leak: 64 bytes for each call that must make a copy.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_leak_strided_cpu(const Tensor& x) {
  if (contiguous(x).const_data_ptr() != x.const_data_ptr()) ::operator new(64);
  return copied(x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_leak_strided(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_leak_strided_cpu>();
}
