// Reads each tensor of the second list as one of the first's dtype.
#include <vector>

#include "bad.h"

using namespace cuda_ops;

namespace {

// The sums of pairs: float32 or float64, as the first of each pair is.
std::vector<Tensor> bad_list_dtype_cpu(const std::vector<Tensor>& xs,
                                       const std::vector<Tensor>& ys) {
  if (xs.size() != ys.size()) refuse("ys", "as many tensors as in 'xs'", "others");
  std::vector<Tensor> outs;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (xs[i].numel() != ys[i].numel()) refuse("ys", "the shapes of 'xs'", "others");
    const Tensor x = contiguous(xs[i]), y = contiguous(ys[i]), out = copied(x);
    const auto add = [&](auto number) {
      using T = decltype(number);
      const auto* a = static_cast<const T*>(x.const_data_ptr());
      const auto* b = static_cast<const T*>(y.const_data_ptr());
      auto* sums = static_cast<T*>(out.mutable_data_ptr());
      for (int64_t k = 0; k < x.numel(); ++k) sums[k] = a[k] + b[k];
    };
    if (dtype_of(x) == DType::kFloat64)
      add(double());
    else if (dtype_of(x) == DType::kFloat32)
      add(float());
    else
      refuse("xs", "tensors of dtype float64 or float32", dtype_name(x));
    outs.push_back(out);
  }
  return outs;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_list_dtype(Tensor[] xs, Tensor[] ys) -> Tensor[]", "").cpu<bad_list_dtype_cpu>();
}
