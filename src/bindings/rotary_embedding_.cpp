// rotary_embedding_(x, cos, sin): pairs of elements of each head turned where they lie.
#include "binding.h"
#include "rotary/rotary_binding.h"

using namespace cuda_ops;

cudaError_t rotary_embedding_in_place_launch(const Rotary& problem, cudaStream_t stream);

namespace {

void rotary_embedding_in_place_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin,
                                   bool interleaved) {
  rotate(x, x, cos, sin, interleaved, false, rotary_cpu);
}

void rotary_embedding_in_place_cuda(const Tensor& x, const Tensor& cos, const Tensor& sin,
                                    bool interleaved) {
  rotate(x, x, cos, sin, interleaved, false, [&](const Rotary& p) {
    launch(x, [&](cudaStream_t stream) { return rotary_embedding_in_place_launch(p, stream); });
  });
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("rotary_embedding_(Tensor(a!) x, Tensor cos, Tensor sin, bool interleaved=False) -> ()",
          "(s,h,d),(s,r),(s,r)->")
      .dtypes(kFloating)
      .dtypes("cos", kFloating)
      .dtypes("sin", kFloating)
      .at_most("2r", "d")
      .doc(R"(Rotary position embedding in place; see rotary_embedding.

There is no gradient: call it under torch.no_grad(). Queries and keys that lie side by side, in the
result of one projection, take one call: x is the view of both.

Shapes: x (..., S, heads, D) of any strides, cos and sin (..., S, R/2) with R at most D. Dims before S
broadcast to those of x. Elements behind R are left alone.
Dtypes: float64, float32, float16 or bfloat16. The tables may have any of them, and are converted as
for rotary_embedding.
Errors: RuntimeError for any other dtype, fewer dims, another size of S, tables of two sizes or for
more than D elements, mixed devices, or an argument that requires a gradient.
Formula: (a, b) becomes (a cos - b sin, b cos + a sin) for each pair.

Example:
>>> x, angle = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[torch.pi]])
>>> cuda_ops.rotary_embedding_(x, angle.cos(), angle.sin())
>>> x
tensor([[[-1.0000, -2.0000,  3.0000]]]))")
      .cpu<rotary_embedding_in_place_cpu>()
      .cuda<rotary_embedding_in_place_cuda>();
}
