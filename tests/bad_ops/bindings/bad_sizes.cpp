// A fake that turns a symbolic size into a number, in its plugin.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_sizes_cpu(const Tensor& x) { return copied(x); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_sizes(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_sizes_cpu>();
}
