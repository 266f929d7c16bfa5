// moe(x, router_logits, w_gate_up, w_down, top_k): a mixture of SwiGLU experts,
// composed of moe_route and moe_experts, which bring gradients, fake tensors and autocast.
#include "binding.h"
#include "compose.h"

using namespace cuda_ops;

namespace {

Tensor moe(const Tensor& x, const Tensor& router_logits, const Tensor& w_gate_up,
           const Tensor& w_down, int64_t top_k, int64_t scoring, bool renormalize,
           const std::optional<Tensor>& expert_bias, bool keep) {
  const auto [weights, experts] = call<std::tuple<Tensor, Tensor>>(
      "cuda_ops::moe_route", "", router_logits, top_k, scoring, renormalize, expert_bias);
  if (!keep) {
    return call<Tensor>("cuda_ops::moe_experts", "", x, w_gate_up, w_down, experts, weights);
  }
  return std::get<0>(call<std::tuple<Tensor, Tensor>>("cuda_ops::moe_experts_keep", "", x,
                                                      w_gate_up, w_down, experts, weights));
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("moe(Tensor x, Tensor router_logits, Tensor w_gate_up, Tensor w_down, SymInt top_k, "
          "int scoring=0, bool renormalize=True, Tensor? expert_bias=None, bool keep=True) -> "
          "Tensor",
          "")
      .calls("moe_route")
      .calls("moe_experts")
      .composite<moe>();
}
