// add(a, b) = a + b, with broadcasting. Its gradient needs no kernel: see cuda_ops/ops/add.py.
#include "binding.h"
#include "by_torch.h"

using namespace cuda_ops;

cudaError_t add_launch(const Strided<2>& problem, cudaStream_t stream);

namespace {

Tensor add_cpu(const Tensor& a, const Tensor& b) {
  return elementwise_cpu([](double x, double y) { return x + y; }, a, b);
}

Tensor add_by_torch(const Tensor& a, const Tensor& b) {
  const auto sum = as_elementwise(add(a, b), a, b);
  return sum ? *sum : add_cpu(a, b);
}

Tensor add_cuda(const Tensor& a, const Tensor& b) { return elementwise_cuda(add_launch, a, b); }

}  // namespace

CUDA_OPS(library) {
  library.op("add(Tensor a, Tensor b) -> Tensor", "(),()->()")
      .dtypes(kFloating)
      .doc(R"(Sum of two tensors, elementwise.

Shapes: a and b (...), broadcast; the result has the broadcast shape, and the layout of a and b if
they share a dense one.
Dtypes: float64, float32, float16 or bfloat16, the same for both. The sum is taken in float64 for
float64 and in float32 for the others, and rounded once.
Errors: RuntimeError for any other dtype, mixed dtypes or devices, or shapes that do not broadcast.
Formula: a + b; like torch.add without type promotion or alpha.

Example:
>>> cuda_ops.add(torch.tensor([1.0, 2.0]), torch.tensor([[10.0], [20.0]]))
tensor([[11., 12.],
        [21., 22.]]))")
      .cpu<add_cpu, add_by_torch>()
      .cuda<add_cuda>();
}
