// A deadlock: never comes back from more than one element.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_hang_cpu(const Tensor& x) {
  for (volatile int64_t i = 0; x.numel() > 1; i = i + 1) {
  }
  return copied(x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_hang(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_hang_cpu>();
}
