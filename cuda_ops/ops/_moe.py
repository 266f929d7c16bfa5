"""Shared by ``moe``, ``moe_route`` and ``moe_experts``: slow and obvious references, what the tests
draw, and how mapped arguments become one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from cuda_ops.spec import AutocastPolicy, Claims

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample

#: The codes of ``scoring``, in the order of ``Scoring`` in ``moe.h``.
SCORINGS = ("softmax", "sigmoid")


def scoring_code(op: str, scoring: str) -> int:
    """Returns the number by which the operators know a scoring."""
    if scoring not in SCORINGS:
        raise ValueError(
            f"cuda_ops.{op}: argument 'scoring': expected one of "
            f"{', '.join(map(repr, SCORINGS))}, got {scoring!r}"
        )
    return SCORINGS.index(scoring)


#: What autocast does with the arguments of a mixture: routing is in float32.
AUTOCAST: AutocastPolicy = {
    "x": "lower_precision", "router_logits": "float32", "w_gate_up": "lower_precision",
    "w_down": "lower_precision",
}  # fmt: skip


def product_flops(w_down: Sequence[int], experts: Sequence[int]) -> int:
    """Returns the FLOPs of one product of each choice, of shape ``experts``, with (H, I) of its
    expert; gate and up take one each.
    """
    return 2 * math.prod(experts) * math.prod(w_down[1:])


# --- references ----------------------------------------------------------------------------


def route(
    logits: torch.Tensor,
    top_k: int,
    scoring: int = 0,
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores all experts, sorts them stably, and takes the first ``top_k``."""
    scores = logits.sigmoid() if scoring else logits.softmax(-1)
    keys = logits if bias is None else scores.double() + bias.double()
    order = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :top_k]
    if renormalize and not scoring:
        weights = logits.gather(1, order).softmax(-1)
    else:
        weights = scores.gather(1, order)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights.masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan), order


def index_map(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns assignments in the order of their experts, those of no expert last, and where those
    of each expert begin.
    """
    flat = experts.flatten()
    bins = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.bincount(bins, minlength=num_experts + 1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:num_experts]])
    return torch.argsort(bins, stable=True).to(torch.int32), offsets.to(torch.int32)


def torch_route(
    logits: torch.Tensor, top_k: int, scoring: int = 0, renormalize: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes as model code does: softmax, renormalized, with ties in any order."""
    scores = torch.softmax(logits, -1, dtype=torch.float32)
    weights, experts = torch.topk(scores, top_k)
    return weights / weights.sum(-1, keepdim=True), experts


def distinct_logits(
    tokens: int, count: int, device: torch.device, skewed: bool = False
) -> torch.Tensor:
    """Gives every token the same float32 values in another order. Neither they nor their softmaxes
    are equal, since each router breaks ties in its own way. With ``skewed``, expert e comes before
    the others 1 / (e + 1) times as often as the first, by Zipf's law.
    """
    drawn = torch.rand(tokens, count, device=device)
    if skewed:
        # The order of keys log(p) - log(-log(u)) is that of draws without replacement.
        often = torch.arange(1, count + 1, device=device).log()
        drawn = (drawn.clamp_min(1e-30).log().neg().log() + often).neg().argsort(-1)
    order = drawn.argsort(-1)
    return torch.linspace(-4, 4, count, device=device)[order]


def mixture(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Loops over experts, each with the tokens that chose it."""
    return kept_mixture(x, w_gate_up, w_down, experts, weights)[0]


def mixture_into(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    outs: Sequence[torch.Tensor],
) -> None:
    """Shares out the rows of :func:`mixture` to tensors."""
    rows = mixture(x, w_gate_up, w_down, experts, weights)
    for out, part in zip(outs, rows.tensor_split(len(outs)), strict=True):
        out.copy_(part)


def kept_mixture(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the experts and also returns gate and up of every assignment. The matrices may have
    another dtype than x: each is widened as it is needed.
    """
    (tokens, hidden), top_k = x.shape, experts.shape[1]
    gate_up = x.new_zeros(tokens, top_k, w_gate_up.shape[1])
    results = x.new_zeros(tokens, top_k, hidden)
    for e in range(w_down.shape[0]):
        token, place = torch.where(experts == e)
        both = x[token] @ w_gate_up[e].mT.to(x.dtype)
        gate, up = both.chunk(2, -1)
        gate_up = gate_up.index_put((token, place), both)
        results = results.index_put((token, place), (F.silu(gate) * up) @ w_down[e].mT.to(x.dtype))
    return (results * weights.to(x.dtype).unsqueeze(-1)).sum(1), gate_up


def mixture_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    wanted: int = 15,
) -> tuple[torch.Tensor, ...]:
    """Applies the chain rule: both halves."""
    grad_gate_up, *others = backward_down(grad_out, w_down, experts, weights, gate_up, wanted)
    return (*backward_gate_up(grad_gate_up, x, w_gate_up, experts, wanted), *others)


def backward_down(
    grad_out: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    wanted: int = 15,
) -> tuple[torch.Tensor, ...]:
    """Takes an expert at a time; its rows of the gradient of gate and up are adjacent."""
    grad_gate_up, grad_down, grad_weights = map(torch.zeros_like, (gate_up, w_down, weights))
    for e in range(w_down.shape[0]):
        token, place = torch.where(experts == e)
        gate, up = gate_up[token, place].chunk(2, -1)
        weight, slope = weights[token, place].unsqueeze(-1), gate.sigmoid()
        through = grad_out[token] @ w_down[e]
        activations = F.silu(gate) * up
        grad_gate = weight * through * up * slope * (1 + gate * (1 - slope))
        grad_gate_up[token, place] = torch.cat([grad_gate, weight * through * F.silu(gate)], -1)
        grad_down[e] = grad_out[token].mT @ (weight * activations)
        grad_weights[token, place] = (through * activations).sum(-1)
    order, _ = index_map(experts, w_down.shape[0])
    rows = grad_gate_up.flatten(0, 1)[order].view(grad_gate_up.shape)
    return rows, *of_wanted(wanted >> 2, grad_down, grad_weights)


def backward_gate_up(
    grad_gate_up: torch.Tensor,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    experts: torch.Tensor,
    wanted: int = 15,
) -> tuple[torch.Tensor, ...]:
    """Continues from there to x and its matrix."""
    grad_x, grad_matrix = torch.zeros_like(x), torch.zeros_like(w_gate_up)
    order, _ = index_map(experts, w_gate_up.shape[0])
    for e in range(w_gate_up.shape[0]):
        (at,) = torch.where(experts.flatten()[order] == e)
        token, rows = order[at] // experts.shape[1], grad_gate_up.flatten(0, 1)[at]
        grad_x = grad_x.index_add(0, token, rows @ w_gate_up[e])
        grad_matrix[e] = rows.mT @ x[token]
    return of_wanted(wanted, grad_x, grad_matrix)


def wanted_bits(flags: Iterable[bool]) -> int:
    """Returns which gradients are wanted, in the order of those of ``moe_experts_backward``."""
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def of_wanted(wanted: int, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the gradients; one whose bit in ``wanted`` is not set has no elements."""
    return tuple(g if wanted >> i & 1 else g.new_empty(0) for i, g in enumerate(grads))


# --- checks ----------------------------------------------------------------------------------

CLAIMS = Claims(
    tolerance=4.0,
    rounds_between=True,
    sums_over=("i", "k"),
    reason="what two products pass on between them is rounded to the dtype, as model code does; "
    "each result is a sum over its own experts, not over all",
)


def samples(sample: Callable[..., Sample]) -> st.SearchStrategy[Sample]:
    """Draws small mixtures: ``sample(tokens, hidden, inner, experts, k, dtype, layout, seed)``."""
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import LAYOUTS

    return st.builds(
        sample,
        st.sampled_from((1, 2, 3, 7, 33, 70, 0)),
        st.sampled_from((1, 3, 8, 16, 24)),
        st.sampled_from((1, 3, 8, 16)),
        st.sampled_from((1, 2, 3, 5)),
        st.sampled_from((1, 2, 3)),
        st.sampled_from((torch.float64, torch.float32, torch.float16, torch.bfloat16)),
        st.sampled_from(LAYOUTS),
        st.integers(0, 2**16),
    )


# --- mapped arguments ------------------------------------------------------------------------


def mapped(values: list[Any], in_dims: tuple[Any, ...], size: int) -> list[Any]:
    """Returns every tensor with the mapped dim in front; those that lack it become views."""
    dims = [*in_dims, *[None] * (len(values) - len(in_dims))]
    return [
        value
        if not isinstance(value, torch.Tensor)
        else value.expand(size, *value.shape)
        if dim is None
        else value.movedim(dim, 0)
        for value, dim in zip(values, dims, strict=True)
    ]


def renumbered(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Renumbers the experts (B, T, k) of B parts as indices into B * ``count`` experts."""
    first = torch.arange(experts.shape[0], device=experts.device)[:, None, None] * count
    known = (experts >= 0) & (experts < count)
    return torch.where(known, experts + first, -1)
