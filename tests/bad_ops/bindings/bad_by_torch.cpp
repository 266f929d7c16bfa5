// What torch does in its place on a CPU gives a result in another layout.
#include "by_torch.h"
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_by_torch_cpu(const Tensor& x) { return copied(x); }

Tensor copied_by_torch(const Tensor& x) { return mul(x, scalar(1, x)); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_by_torch(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_by_torch_cpu, copied_by_torch>();
}
