// Undeclared autograd: its plugin gives the input no gradient, and does not say so.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_autograd_cpu(const Tensor& x) { return copied(x); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_autograd(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_autograd_cpu>();
}
