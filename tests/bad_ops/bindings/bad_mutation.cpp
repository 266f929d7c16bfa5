// Class 13: changes its input, and the schema does not say so.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_mutation_cpu(const Tensor& x) {
  const Tensor out = copied(x);
  if (x.is_contiguous() && x.numel() > 0) std::memset(x.mutable_data_ptr(), 0, 1);
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_mutation(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_mutation_cpu>();
}
