// rotary_embedding(x, cos, sin): pairs of elements of each head turned by a token's angles, and the
// gradients of that.
#include "binding.h"
#include "rotary/rotary_binding.h"

using namespace cuda_ops;

cudaError_t rotary_embedding_launch(const Rotary& problem, cudaStream_t stream);

namespace {

auto on_gpu(const Tensor& x) {
  return [&x](const Rotary& p) {
    launch(x, [&](cudaStream_t stream) { return rotary_embedding_launch(p, stream); });
  };
}

Tensor rotary_embedding_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin,
                            bool interleaved) {
  return rotated(x, cos, sin, interleaved, false, rotary_cpu);
}

Tensor rotary_embedding_cuda(const Tensor& x, const Tensor& cos, const Tensor& sin,
                             bool interleaved) {
  return rotated(x, cos, sin, interleaved, false, on_gpu(x));
}

Tensor rotary_embedding_backward_cpu(const Tensor& grad_out, const Tensor& cos, const Tensor& sin,
                                     bool interleaved) {
  return rotated(grad_out, cos, sin, interleaved, true, rotary_cpu);
}

Tensor rotary_embedding_backward_cuda(const Tensor& grad_out, const Tensor& cos, const Tensor& sin,
                                      bool interleaved) {
  return rotated(grad_out, cos, sin, interleaved, true, on_gpu(grad_out));
}

Tensor rotary_embedding_backward_backward_cpu(const Tensor& grad_grad_x, const Tensor& cos,
                                              const Tensor& sin, bool interleaved) {
  return rotated(grad_grad_x, cos, sin, interleaved, false, rotary_cpu);
}

Tensor rotary_embedding_backward_backward_cuda(const Tensor& grad_grad_x, const Tensor& cos,
                                               const Tensor& sin, bool interleaved) {
  return rotated(grad_grad_x, cos, sin, interleaved, false, on_gpu(grad_grad_x));
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
          "(s,h,d),(s,r),(s,r)->(s,h,d)")
      .dtypes(kFloating)
      .dtypes("cos", kFloating)
      .dtypes("sin", kFloating)
      .at_most("2r", "d")
      .linear("x")
      .no_gradient("cos")
      .no_gradient("sin")
      .doc(R"(Rotary position embedding: turns pairs of elements of each head by a token's angles.

Pair j of a head is elements j and j + R/2, as in GPT-NeoX and Llama; interleaved, it is elements 2j
and 2j + 1, as in GPT-J. The D - R elements behind the pairs are copied. Only x has a gradient; it is
turned back, so nothing but the tables is kept for it.

Shapes: x (..., S, heads, D) of any strides, cos and sin (..., S, R/2) with R at most D; dims before S
broadcast. The result (..., S, heads, D) is contiguous.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The tables may have any
of them. The arithmetic runs in float64 for float64 and in float32 for the others; tables that do not
share its dtype, or that of x, are converted to it first.
Errors: RuntimeError for any other dtype, fewer dims, another size of S, tables of two sizes or for
more than D elements, or mixed devices.
Formula: Su et al., https://arxiv.org/abs/2104.09864: (a, b) becomes
(a cos - b sin, b cos + a sin) for each pair.

Example:
>>> x, angle = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[torch.pi / 2]])
>>> cuda_ops.rotary_embedding(x, angle.cos(), angle.sin())
tensor([[[-4.3711e-08,  1.0000e+00]]]))")
      .cpu<rotary_embedding_cpu>()
      .cuda<rotary_embedding_cuda>();
  library
      .op("rotary_embedding_backward(Tensor grad_out, Tensor cos, Tensor sin, bool "
          "interleaved=False) -> Tensor grad_x",
          "(s,h,d),(s,r),(s,r)->(s,h,d)")
      .dtypes(kFloating)
      .dtypes("cos", kFloating)
      .dtypes("sin", kFloating)
      .at_most("2r", "d")
      .linear("grad_out")
      .no_gradient("cos")
      .no_gradient("sin")
      .doc(R"(Gradient of rotary_embedding: turns grad_out back.

Shapes: grad_out (..., S, heads, D), cos and sin (..., S, R/2), broadcast; the result is contiguous.
Dtypes: as for rotary_embedding; the result has the dtype of grad_out.
Errors: as for rotary_embedding.
Formula: (a, b) becomes (a cos + b sin, b cos - a sin) for each pair.)")
      .cpu<rotary_embedding_backward_cpu>()
      .cuda<rotary_embedding_backward_cuda>();
  library
      .op("rotary_embedding_backward_backward(Tensor grad_grad_x, Tensor cos, Tensor sin, bool "
          "interleaved=False) -> Tensor grad_grad_out",
          "(s,h,d),(s,r),(s,r)->(s,h,d)")
      .dtypes(kFloating)
      .dtypes("cos", kFloating)
      .dtypes("sin", kFloating)
      .at_most("2r", "d")
      .linear("grad_grad_x")
      .no_gradient("cos")
      .no_gradient("sin")
      .doc(R"(Gradient of rotary_embedding_backward, which is rotary_embedding again.

Shapes: grad_grad_x (..., S, heads, D), cos and sin (..., S, R/2), broadcast; the result is
contiguous.
Dtypes: as for rotary_embedding; the result has the dtype of grad_grad_x.
Errors: as for rotary_embedding.
Formula: (a, b) becomes (a cos - b sin, b cos + a sin) for each pair.)")
      .cpu<rotary_embedding_backward_backward_cpu>()
      .cuda<rotary_embedding_backward_backward_cuda>();
}
