// Class 12: the results of a list move up behind an empty tensor.
#include <algorithm>
#include <vector>

#include "bad.h"

using namespace cuda_ops;

namespace {

// The sum of each tensor.
Tensor bad_list_cpu(const std::vector<Tensor>& xs) {
  if (xs.empty()) refuse("xs", "at least one tensor", "none");
  Tensor out = empty({static_cast<int64_t>(xs.size())}, DType::kFloat64, xs[0]);
  auto* sums = static_cast<double*>(out.mutable_data_ptr());
  std::fill(sums, sums + xs.size(), 0.0);
  for (const Tensor& x : xs) {
    if (x.numel() == 0) continue;
    const Tensor dense = contiguous(x);
    const auto* values = static_cast<const double*>(dense.const_data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i) *sums += values[i];
    ++sums;
  }
  return out;
}

}  // namespace

CUDA_OPS(library) { library.op("bad_list(Tensor[] xs) -> Tensor", "").cpu<bad_list_cpu>(); }
