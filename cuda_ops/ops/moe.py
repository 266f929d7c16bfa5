"""``moe``: the function that models call, and its peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from cuda_ops.derive import layout
from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _moe, _moe_checks, _moe_parallel
from cuda_ops.registry import function
from cuda_ops.spec import AutocastPolicy, BenchmarkCase, Claims, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample


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
        group: Any = None,
    ) -> torch.Tensor:
        if group is not None:
            from cuda_ops.ops import _moe_ranks

            return _moe_ranks.mixture(
                group, x, router_logits, w_gate_up, w_down, top_k,
                renormalize=renormalize, scoring=scoring, expert_bias=expert_bias,
            )  # fmt: skip
        # Checked here: the composed operator cannot say why a part refuses something.
        _moe_checks.mixture(op, x, router_logits, w_gate_up, w_down, top_k)
        _moe_parallel.check(
            w_gate_up=w_gate_up,
            w_down=w_down,
            x=x,
            router_logits=router_logits,
            expert_bias=expert_bias,
        )
        route = function("moe_route")
        rows, logits = layout.as_rows(x), layout.as_rows(router_logits)
        code = _moe.scoring_code("moe", scoring)
        weights, experts = route(logits, top_k, code, renormalize, expert_bias)
        out = _moe_parallel.mixture(rows, w_gate_up, w_down, experts, weights)
        return out if x.dim() == 2 else out.reshape(x.shape)

    moe.__doc__ = _DOC
    return moe


_DOC = """A mixture of SwiGLU experts: each token goes through top_k of E, weighted.

moe_route chooses the experts (among equal logits the lower expert comes first; NaN is larger than
any number and affects only its own token), and moe_experts runs them. Tokens are never permuted or
copied, nothing waits for the device, and the same call gives the same bits every time, as do its
gradients. A CUDA graph of one call is valid for every routing.

Shapes: x (..., H), router_logits (..., E) with the same leading dims, w_gate_up (E, 2I, H) with the
gate first and w_down (E, H, I) as Hugging Face keeps them; the result has the shape of x. E from 1
to 512.
Dtypes: x and both matrices float64, float32, float16 or bfloat16, the same for all; router_logits
any of these. Sums run in float32, or in float64 for float64 and on a CPU.
Several devices: x and router_logits may be DTensors sharded by token, and both matrices sharded by
expert along a mesh dim, (Shard(0)). Tokens sharded along that dim too go to their experts and back;
of others the result is a partial sum along it. Or all are plain tensors and group says which
processes call together: x and router_logits are then this rank's tokens, as many as it likes, with
logits of all experts, the matrices are this rank's experts, in the order of ranks and maybe none,
and the result is this rank's tokens. All ranks must call, with gradients or without; one whose
arguments do not fit makes all of them refuse.
Memory: the gradient keeps the arguments, gate and up of each of the T * top_k choices, and 12 bytes
of routing for each (16 for float64 logits). Arguments that are not contiguous are copied.

Args:
    x: tokens.
    router_logits: the router's logits for each token.
    w_gate_up, w_down: all experts' matrices.
    top_k: experts per token, from 1 to 16 and at most E.
    renormalize: divide a token's weights by their sum (for sigmoids by their sum + 1e-20).
    scoring: "softmax" over all experts, or "sigmoid" of each.
    expert_bias: (E) of any floating dtype, added to the scores when choosing, not to the weights;
        no gradient. A DTensor if the others are.
    group: the ranks that call together, a ProcessGroup or one dim of a DeviceMesh.

Errors: RuntimeError for any other shape, dtype or device, a top_k out of range, T * top_k of 2^31
or more, DTensors mixed with plain tensors or with a group, second derivatives, transforms of
torch.func beside a group, ranks that do not fit together, and one that does not come within
CUDA_OPS_RANKS_TIMEOUT; ValueError for any other scoring.
Formula: Shazeer et al., https://arxiv.org/abs/1701.06538, with the SwiGLU experts of Shazeer,
https://arxiv.org/abs/2002.05202.

Example:
>>> x, router_logits = torch.ones(1, 2), torch.tensor([[1.0, 3.0]])
>>> cuda_ops.moe(x, router_logits, torch.ones(2, 2, 2), torch.ones(2, 2, 1), top_k=1)
tensor([[3.5232, 3.5232]])
"""


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy:
    """Declares what its parts do: they route in float32."""
    return _moe.AUTOCAST


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
    """Loops over experts."""
    weights, experts = _moe.route(router_logits, top_k, scoring, renormalize, expert_bias)
    return _moe.mixture(x, w_gate_up, w_down, experts, weights)


@hookimpl
def cuda_ops_claims(op: OpSpec) -> Claims:
    return _moe.CLAIMS


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    from cuda_ops.testing.samples import Sample, TensorArg

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

    return _moe.samples(sample)


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import compiled

    return {"grouped_mm": grouped_mm, "grouped_mm compiled": compiled(grouped_mm)}


def grouped_mm(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Composes it of ``torch._grouped_mm`` as model code does, on a permuted copy of the tokens,
    sorted by expert.
    """
    weights, experts = _moe.torch_route(router_logits, top_k)
    order = torch.argsort(experts.flatten(), stable=True)
    token = order // top_k
    ends = torch.histc(
        experts.flatten().float(), bins=w_down.shape[0], min=0, max=w_down.shape[0] - 1
    ).cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[token], w_gate_up.mT, offs=ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, w_down.mT, offs=ends)
    rows = rows * weights.flatten()[order].to(x.dtype).unsqueeze(-1)
    return torch.zeros_like(x).index_add_(0, token, rows)


#: H, I, E and experts a token, by model.
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral 8x7B": (4096, 14336, 8, 2),
    "OLMoE": (2048, 1024, 64, 8),
    "DeepSeek-V3, 32 of its experts": (7168, 2048, 32, 8),
}
#: A model too large for a set of matrices at each call: 21 GiB.
WHOLE = {"DeepSeek-V3": (7168, 2048, 256, 8)}


#: Tokens of a step of training; longer where the float64 reference leaves room for them.
_TRAINING = {"Qwen3-30B-A3B": (8192, 32768), "OLMoE": (8192, 32768)}


#: Models and tokens of cases whose experts are chosen by Zipf's law.
_SKEWED = (("Qwen3-30B-A3B", 4096), ("Qwen3-30B-A3B", 16384), ("Mixtral 8x7B", 4096),
           ("DeepSeek-V3, 32 of its experts", 4096))  # fmt: skip


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    tokens = 1, 8, 64, 512, 4096, 16384
    forward = [_case(op, model, t) for model in (*MODELS, *WHOLE) for t in tokens]
    long = [_case(op, model, 32768) for model in MODELS]
    skewed = [_case(op, model, t, skewed=True) for model, t in _SKEWED]
    training = [
        _case(op, model, t, backward=True)
        for model in MODELS
        for t in _TRAINING.get(model, (8192,))
    ]
    return forward + long + skewed + training


def _case(
    op: OpSpec, model: str, tokens: int, backward: bool = False, skewed: bool = False
) -> BenchmarkCase:
    from cuda_ops.benchmarking import rotation

    hidden, inner, count, top_k = (MODELS | WHOLE)[model]
    # The number of experts that random choices are expected to meet. Skewed ones of so many tokens
    # meet all too.
    active = round(count * (1 - (1 - top_k / count) ** tokens))

    def logits(device: torch.device) -> torch.Tensor:
        # Another number would not move the bytes that the case states. This one is the likeliest.
        while True:
            drawn = _moe.distinct_logits(tokens, count, device, skewed)
            if drawn.topk(top_k).indices.unique().numel() == active:
                return drawn

    def matrices(device: torch.device) -> dict[int, torch.Tensor]:
        shapes = (count, 2 * inner, hidden), (count, hidden, inner)
        return {
            i: rotation.random_tensor(shape, torch.bfloat16, device).mul_(shape[-1] ** -0.5)
            for i, shape in enumerate(shapes, start=2)
        }

    def inputs(device: torch.device) -> tuple[Any, ...]:
        own = {2: None, 3: None} if model in WHOLE else matrices(device)
        x = rotation.random_tensor((tokens, hidden), torch.bfloat16, device)
        return x, logits(device), own[2], own[3], top_k

    in_use, rows = active * 6 * inner * hidden, 4 * tokens * hidden + 4 * tokens * count
    forward = 3 * _moe.product_flops((count, hidden, inner), (tokens, top_k))

    group = "T 1 to 64" if tokens <= 64 else "T >= 512"
    if backward or skewed:
        group = "training" if backward else "skewed"

    def without_gradient(*args: Any) -> Any:
        """Calls what ``cuda_ops.moe`` does where no gradient is wanted."""
        return op.function(*args, keep=False)

    return BenchmarkCase(
        f"{model}, T={tokens} bfloat16"
        + {"training": ", forward and backward", "skewed": ", skewed"}.get(group, ""),
        inputs,
        # Backward reads both matrices once more and writes a gradient of every argument.
        bytes=2 * in_use + 6 * count * inner * hidden + 3 * rows if backward else in_use + rows,
        flops=3 * forward if backward else forward,
        reason=f"{model}, training" if backward else model,
        group=group,
        dtype=torch.bfloat16,
        function=None if backward else without_gradient,
        backward=backward,
        memory=tokens >= 4096,  # below that it is little beside the matrices
        make_shared=matrices if model in WHOLE else None,
    )
