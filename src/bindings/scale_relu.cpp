// scale_relu(x, scale) = relu(x * scale + 1), composed of torch's own operators:
// no kernel here, and no gradient to write.
#include "binding.h"
#include "compose.h"

using namespace cuda_ops;

namespace {

Tensor scale_relu(const Tensor& x, double scale) {
  if (x.dim() == 0) {  // else scalar() would round to its dtype
    const Tensor row = call<Tensor>("aten::unsqueeze", "", x, int64_t(0));
    return call<Tensor>("aten::squeeze", "dim", scale_relu(row, scale), int64_t(0));
  }
  const Tensor shifted = add(mul(x, scalar(scale, x)), scalar(1, x));
  return call<Tensor>("aten::relu", "", shifted);
}

}  // namespace

CUDA_OPS(library) {
  library.op("scale_relu(Tensor x, float scale) -> Tensor", "()->()")
      .dtypes(kFloating)
      .doc(R"(Scales x, adds one and rectifies: relu(x * scale + 1).

Shapes: x (...); the result has the shape of x.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. It is composed of
aten::mul, aten::subtract and aten::relu, so each of the three rounds to that dtype.
Errors: RuntimeError for any other dtype.
Formula: relu as in torch.nn.functional.relu. Gradients of any order follow from the three parts.

Example:
>>> cuda_ops.scale_relu(torch.tensor([-1.0, 2.0]), 3.0)
tensor([0., 7.]))")
      .composite<scale_relu>();
}
