// Takes a keyword and does not use it.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_keyword_cpu(const Tensor& x, bool) { return copied(x); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_keyword(Tensor x, *, bool negate=False) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_keyword_cpu>();
}
