"""``moe``: the function that models call, and who else computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from cuda_ops import experts as of_experts
from cuda_ops import shapes
from cuda_ops.benchmarking import rotation
from cuda_ops.hookspecs import hookimpl
from cuda_ops.registry import function
from cuda_ops.spec import AutocastPolicy, BenchmarkCase, Claims, OpSpec, Peer
from cuda_ops.testing.samples import Sample, TensorArg


@hookimpl
def cuda_ops_public(op: OpSpec) -> Callable[..., Any]:
    def moe(
        x: torch.Tensor,
        router_logits: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        top_k: int,
        *,
        renormalize: bool = True,
        scoring: str = "softmax",
        expert_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # The operator itself, made of the same two, cannot pass on what they refuse and why.
        route = function("moe_route")
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if x.dim() != 2:
            router_logits = router_logits.reshape(-1, router_logits.shape[-1])
        code = of_experts.scoring_code("moe", scoring)
        weights, experts = route(router_logits, top_k, code, renormalize, expert_bias)
        inputs = (rows, w_gate_up, w_down, experts, weights)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            out: torch.Tensor = function("moe_experts_keep")(*inputs)[0]
        else:
            out = function("moe_experts")(*inputs)
        return out if x.dim() == 2 else out.reshape(x.shape)

    moe.__doc__ = _DOC
    return moe


_DOC = """A mixture of SwiGLU experts: each token through its top_k of E experts, weighted.

moe_route chooses, by the rules that it states (of equal logits the lower expert; NaN is larger than
any number and stays within its token), and moe_experts computes. Tokens are never permuted or
copied, nothing waits for the device, and the same call gives the same bits every time, gradients
too. A CUDA graph of one call is right for every routing.

Shapes: x (..., H), router_logits (..., E), w_gate_up (E, 2I, H) with the gate first and w_down
(E, H, I) as Hugging Face keeps them; the result has the shape of x. E from 1 to 512.
Dtypes: x and both matrices float64, float32, float16 or bfloat16, the same for all; router_logits
any of these. Sums run in float32, in float64 for float64.
Memory: for the gradient, gate and up of each of the T * top_k assignments beside the arguments.

Args:
    x: tokens.
    router_logits: what the router says of each of them.
    w_gate_up, w_down: all experts' matrices.
    top_k: experts a token, from 1 to 16.
    renormalize: divide a token's weights by their sum.
    scoring: "softmax" over all experts, or "sigmoid" of each.
    expert_bias: (E), added to scores to choose by, not to weights.

Errors: RuntimeError for another shape or dtype or a top_k out of range, ValueError for another
scoring.
Formula: Shazeer et al., https://arxiv.org/abs/1701.06538, with the experts of Shazeer,
https://arxiv.org/abs/2002.05202, SwiGLU.
"""


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy:
    """Which its parts bring about; they route in float32."""
    return "lower_precision"


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any]:
    """As of the parts: mapped tokens are more tokens, mapped matrices more experts."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        values = shapes.bind(op, args, kwargs)
        if len(in_dims) > 7 and in_dims[7] is not None:
            raise RuntimeError(f"{op.qualname}: argument 'expert_bias': vmap shares it among rows")
        bias, size = values[7], info.batch_size
        x, logits, w_gate_up, w_down, *_ = of_experts.mapped(values[:4], in_dims[:4], size)
        route = function("moe_route")
        weights, experts = route(logits.flatten(0, 1), *values[4:7], bias)
        if in_dims[2] is None and in_dims[3] is None:
            w_gate_up, w_down = w_gate_up[0], w_down[0]
        else:
            parts = experts.reshape(size, -1, experts.shape[1])
            experts = of_experts.renumbered(parts, w_down.shape[1]).flatten(0, 1)
            w_gate_up, w_down = w_gate_up.flatten(0, 1), w_down.flatten(0, 1)
        arguments = (x.flatten(0, 1), w_gate_up, w_down, experts, weights)
        if values[8]:
            out = function("moe_experts_keep")(*arguments)[0]
        else:
            out = function("moe_experts")(*arguments)
        return out.reshape(x.shape), 0

    return rule


# --- testing and timing --------------------------------------------------------------------


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return naive


def naive(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: int,
    scoring: int = 0,
    renormalize: bool = True,
    expert_bias: torch.Tensor | None = None,
    keep: bool = True,
) -> torch.Tensor:
    """A loop over experts."""
    weights, experts = of_experts.route(router_logits, top_k, scoring, renormalize, expert_bias)
    return of_experts.mixture(x, w_gate_up, w_down, experts, weights)


@hookimpl
def cuda_ops_claims(op: OpSpec) -> Claims:
    return of_experts.CLAIMS


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    def sample(
        tokens: int, hidden: int, inner: int, count: int, k: int, dtype: Any, layout: Any, seed: int
    ) -> Sample:
        tensors = (
            TensorArg((tokens, hidden), dtype, layout),
            TensorArg((tokens, count), dtype),
            TensorArg((count, 2 * inner, hidden), dtype),
            TensorArg((count, hidden, inner), dtype),
        )
        return Sample((*tensors, min(k, count)), seed=seed)

    return of_experts.samples(sample)


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    return {"loop": naive, "grouped_mm": grouped_mm}


def grouped_mm(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """What model code composes of ``torch._grouped_mm``: a permuted copy of the tokens, sorted by
    expert.
    """
    weights, experts = torch.topk(torch.softmax(router_logits, -1, dtype=torch.float32), top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    order, ends = of_experts.by_expert(experts, w_down.shape[0])
    token = order // top_k
    gate, up = torch._grouped_mm(x[token], w_gate_up.mT, offs=ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, w_down.mT, offs=ends)
    rows = rows * weights.flatten()[order].to(x.dtype).unsqueeze(-1)
    return torch.zeros_like(x).index_add_(0, token, rows)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    """Decoding, which streams matrices; few tokens an expert; and many, which multiply."""
    tokens = (1, 8, 64, 512, 4096, 16384, 32768)
    return [_case(model, t) for model in of_experts.MODELS for t in tokens]


def _case(model: str, tokens: int) -> BenchmarkCase:
    hidden, inner, count, top_k = of_experts.MODELS[model]

    def inputs(device: torch.device) -> tuple[Any, ...]:
        x, w_gate_up, w_down = of_experts.model_tensors(model, tokens, device)
        logits = rotation.random_tensor((tokens, count), torch.bfloat16, device)
        return x, logits, w_gate_up, w_down, top_k

    matrices = of_experts.active_experts(model, tokens) * 6 * inner * hidden
    return BenchmarkCase(
        f"{model}, T={tokens} bfloat16",
        inputs,
        bytes=int(matrices) + 4 * tokens * hidden + 2 * tokens * count,
        flops=6 * tokens * top_k * hidden * inner,
        reason=model,
        dtype=torch.bfloat16,
    )
