// attention(q, k, v): softmax(q k^T scale) v for each head, and its gradient.
#include "attention/attention_binding.h"
#include "tuned.h"

using namespace cuda_ops;

AttentionPlan attention_plan(const Attention& problem);
cudaError_t attention_launch(const Attention& problem, cudaStream_t stream);
cudaError_t attention_backward_launch(const AttentionGradient& problem, cudaStream_t stream);

namespace {

using Result = std::tuple<Tensor, Tensor>;

// Allocates the results and calls run(problem).
template <class Run>
Result attended(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                std::optional<double> scale, Run run) {
  Attention p;
  p.shape = shape_of_attention(q, k, causal, scale);
  const auto loop = broadcast_shape({View(q), View(k), View(v)}, 2);
  Tensor out = empty(with_core(loop, {p.shape.queries, p.shape.dim}), q);
  Tensor lse = empty(with_core(loop, {p.shape.queries}), compute_dtype(dtype_of(q)), q);
  const Tensor queries = dense_rows(q), keys = dense_rows(k), values = dense_rows(v);
  p.heads = strided({writable_view(out)}, {View(queries), View(keys), View(values)}, 2);
  p.q_step = step_of(queries, queries.dim() - 2);
  p.k_step = step_of(keys, keys.dim() - 2);
  p.v_step = step_of(values, values.dim() - 2);
  p.lse = lse.mutable_data_ptr();
  p.shape.vectors = has_aligned_rows(p.heads, 0, p.q_step) &&
                    has_aligned_rows(p.heads, 1, p.k_step) &&
                    has_aligned_rows(p.heads, 2, p.v_step);
  run(p);
  return {out, lse};
}

Result attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                     std::optional<double> scale) {
  return attended(q, k, v, causal, scale, [](const Attention& p) { attend_cpu(p); });
}

// Whether kernels for Hopper run where they can.
Knob for_hopper{"hopper", 1, {1, 0}};

template <class Problem>
bool may_use_hopper(const Problem& p) {
  const int bucket = bucket_of(p.shape.queries, p.shape.keys, p.heads.dtype);
  return built_for_hopper() && for_hopper.at(bucket) == 1;
}

Result attention_cuda(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                      std::optional<double> scale) {
  return attended(q, k, v, causal, scale, [&](Attention& p) {
    launch(q, [&](cudaStream_t stream) {
      p.may_use_hopper = may_use_hopper(p);
      p.plan = attention_plan(p);
      // Freed when this returns: torch's allocator gives them to later work of this stream only.
      std::optional<Tensor> out, lse;
      if (p.plan.splits > 1) {
        const int64_t rows = p.plan.splits * p.heads.numel * p.shape.queries;
        out = empty({rows * p.shape.dim}, compute_dtype(p.heads.dtype), q);
        lse = empty({rows}, compute_dtype(p.heads.dtype), q);
        p.partial_out = out->mutable_data_ptr();
        p.partial_lse = lse->mutable_data_ptr();
      }
      return attention_launch(p, stream);
    });
  });
}

// --- gradient -------------------------------------------------------------------

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

void check_lse(const Tensor& q, const Tensor& lse) {
  const DType expected = compute_dtype(dtype_of(q)), actual = dtype_of(lse);
  if (actual != expected) refuse("lse", std::string("dtype ") + name(expected), name(actual));
}

template <class Run>
Gradients gradients(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& out, const Tensor& lse, bool causal, std::optional<double> scale,
                    Run run) {
  check_lse(q, lse);
  AttentionGradient p;
  p.shape = shape_of_attention(q, k, causal, scale);
  auto loop = broadcast_shape({View(grad_out), View(q), View(k), View(v), View(out)}, 2);
  broadcast(loop, View(lse), static_cast<int>(lse.dim()) - 1);
  Tensor grad_q = empty(with_core(loop, {p.shape.queries, p.shape.dim}), q);
  Tensor grad_k = empty(with_core(loop, {p.shape.keys, p.shape.dim}), q);
  Tensor grad_v = empty(with_core(loop, {p.shape.keys, p.shape.dim}), q);
  const Tensor queries = dense_rows(q), keys = dense_rows(k), values = dense_rows(v);
  const Tensor grads = dense_rows(grad_out), outs = dense_rows(out);
  const Tensor sums = contiguous(lse, with_core(loop, {p.shape.queries}));
  p.heads = strided({writable_view(grad_q), writable_view(grad_k), writable_view(grad_v)},
                    {View(queries), View(keys), View(values), View(grads), View(outs)}, 2);
  p.q_step = step_of(queries, queries.dim() - 2);
  p.k_step = step_of(keys, keys.dim() - 2);
  p.v_step = step_of(values, values.dim() - 2);
  p.grad_step = step_of(grads, grads.dim() - 2);
  p.out_step = step_of(outs, outs.dim() - 2);
  p.lse = sums.const_data_ptr();
  p.shape.vectors =
      has_aligned_rows(p.heads, 0, p.q_step) && has_aligned_rows(p.heads, 1, p.k_step) &&
      has_aligned_rows(p.heads, 2, p.v_step) && has_aligned_rows(p.heads, 3, p.grad_step);
  run(p);
  return {grad_q, grad_k, grad_v};
}

Gradients attention_backward_cpu(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Tensor& out, const Tensor& lse, bool causal,
                                 std::optional<double> scale) {
  return gradients(grad_out, q, k, v, out, lse, causal, scale,
                   [](const AttentionGradient& p) { attention_gradient_cpu(p); });
}

Gradients attention_backward_cuda(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& out, const Tensor& lse,
                                  bool causal, std::optional<double> scale) {
  return gradients(grad_out, q, k, v, out, lse, causal, scale, [&](AttentionGradient& p) {
    p.may_use_hopper = may_use_hopper(p);
    launch(q, [&](cudaStream_t stream) {
      // Freed when this returns: torch's allocator gives it to later work of this stream only.
      const Tensor delta =
          empty({p.heads.numel * p.shape.queries}, compute_dtype(p.heads.dtype), q);
      p.delta = delta.mutable_data_ptr();
      return attention_backward_launch(p, stream);
    });
  });
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("attention(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None) -> "
          "(Tensor "
          "out, Tensor lse)",
          "(m,d),(n,d),(n,d)->(m,d),(m)")
      .dtypes(kFloating)
      .range("d", 1, kMostHeadDim)
      .hidden("lse")
      .doc(
          R"(Attention of each head, without a matrix of scores: softmax(q k^T scale) v.

The operator itself knows no groups: heads are loop dims like any others, and broadcast. The gradient
computes the weights anew from the logarithm of their sum, which is kept beside the arguments and the
result.

Shapes: q (..., M, D), k and v (..., N, D), D from 1 to 256; the result (..., M, D) is contiguous.
Loop dims broadcast. A tensor whose last dim has stride 1 is read where it lies, any other is copied
first.
Dtypes: float64, float32, float16 or bfloat16, the same for all. Sums run in float64 for float64 and
in float32 for the others. Weights of float16 and bfloat16 are rounded before they are multiplied
with v, as tensor cores take them.
Memory: where few queries meet many keys, during the call up to 128 copies of the result, in the
dtype that sums run in.
Errors: RuntimeError for any other dtype, another size of D or N, D beyond 256, mixed dtypes or
devices, or loop dims that do not broadcast.
Formula: Dao, https://arxiv.org/abs/2307.08691: out = softmax(q k^T scale) v; where `causal`, query i
sees the keys 0 to i.)")
      .cpu<attention_cpu>()
      .cuda<attention_cuda>();
  library
      .op("attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
          "lse, "
          "bool causal=False, float? scale=None) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
          "(m,d),(m,d),(n,d),(n,d),(m,d),(m)->(m,d),(n,d),(n,d)")
      .dtypes(kFloating)
      .dtypes("lse", {DType::kFloat64, DType::kFloat32})
      .range("d", 1, kMostHeadDim)
      .doc(R"(Gradient of attention. The same call gives the same bits every time.

Shapes: grad_out, q and out (..., M, D), k and v (..., N, D), lse (..., M); grad_q (..., M, D), grad_k
and grad_v (..., N, D) are contiguous and have the loop dims of all of them. The caller sums over the
dims along which an input was broadcast.
Dtypes: as for attention; lse is float64 for float64, else float32.
Memory: during the call, a number for each query, in the dtype of lse.
Errors: RuntimeError as in attention, and for another dtype of lse.
Formula: with weights p = exp(q k^T scale - lse) and g = p (grad_out v^T - sum(grad_out out)) scale:
grad_q = g k, grad_k = g^T q, grad_v = p^T grad_out.)")
      .cpu<attention_backward_cpu>()
      .cuda<attention_backward_cuda>();
}
