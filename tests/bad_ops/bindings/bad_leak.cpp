// A leak: 64 bytes for each call.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_leak_cpu(const Tensor& x) {
  ::operator new(64);
  return copied(x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_leak(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_leak_cpu>();
}
