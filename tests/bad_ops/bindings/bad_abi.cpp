// Class 1: needs a function of torch's C++ ABI, which the next torch may not have.
#include "bad.h"

using namespace cuda_ops;

namespace at {
int get_num_threads();
}

namespace {

Tensor bad_abi_cpu(const Tensor& x) {
  return mapped(x, [](double v) { return at::get_num_threads() > 0 ? v : 0; });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_abi(Tensor x) -> Tensor", "()->()").dtypes(kWide).cpu<bad_abi_cpu>();
}
