// dropout(x) = x / (1 - p) or, with probability p, 0. It is linear in x, so its gradient is the
// same function of the same key; the plugin says so of the gradient's own.
#include "binding.h"
#include "random_binding.h"

using namespace cuda_ops;

cudaError_t dropout_launch(const Strided<2>& problem, RandomKey key, double p, cudaStream_t stream);

namespace {

double dropped(const Draw& draw, double x, double p) {
  return draw.is_below(Chance(p)) ? 0 : x / (1 - p);
}

Tensor dropout_cpu(const Tensor& x, const Tensor& key, double p) {
  return random_cpu(dropped, key, x, p);
}

Tensor dropout_cuda(const Tensor& x, const Tensor& key, double p) {
  return random_cuda(dropout_launch, key, x, p);
}

Tensor dropout_backward_cpu(const Tensor& grad_out, const Tensor& key, double p) {
  return dropout_cpu(grad_out, key, p);
}

Tensor dropout_backward_cuda(const Tensor& grad_out, const Tensor& key, double p) {
  return dropout_cuda(grad_out, key, p);
}

}  // namespace

CUDA_OPS(library) {
  library.op("dropout(Tensor x, Tensor key, float p=0.5) -> Tensor", "(),[2]->()")
      .dtypes(kFloating)
      .random("key")
      .range("p", 0.0, 1.0)
      .doc(R"(Drops elements of x with probability p and divides the others by 1 - p.

Shapes: x (...); the result has the shape of x, and its layout where x is dense.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The arithmetic runs in
float64 for float64 and in float32 for the others.
Errors: RuntimeError for any other dtype or a p that is not from 0 to 1.
Formula: the element with index i in the order of the dims is 0 if uniform(key, i) < p, with 24 bits
of Philox4x32-10, also where x is infinite or NaN; Srivastava et al.,
https://jmlr.org/papers/v15/srivastava14a.html. The gradient makes the same numbers again.)")
      .cpu<dropout_cpu>()
      .cuda<dropout_cuda>();
  library
      .op("dropout_backward(Tensor grad_out, Tensor key, float p) -> Tensor grad_x", "(),[2]->()")
      .dtypes(kFloating)
      .random("key")
      .linear("grad_out")
      .range("p", 0.0, 1.0)
      .doc(R"(Gradient of dropout: what was kept gets grad_out / (1 - p), the rest 0.

Shapes: grad_out (...); the result has its shape, and its layout where it is dense.
Dtypes: float64, float32, float16 or bfloat16.
Errors: RuntimeError for any other dtype or a p that is not from 0 to 1.
Formula: dropout of grad_out with the same key.)")
      .cpu<dropout_backward_cpu>()
      .cuda<dropout_backward_cuda>();
}
