// A wrong batching rule, in its plugin: it takes every mapped dim for the first.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_vmap_cpu(const Tensor& x) { return copied(x); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_vmap(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_vmap_cpu>();
}
