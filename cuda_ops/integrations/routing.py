"""What routes instead of the gates of Hugging Face's sparse blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import cuda_ops
from cuda_ops.integrations.blocks import Block

Route = Callable[..., tuple[torch.Tensor, ...]]


def chosen(block: Block, gate: torch.nn.Module) -> Route | None:
    """Returns the forward of a gate that gives the same as its own, or None if there is none.

    There is none where some groups of experts are left out, and for versions of transformers whose
    blocks choose outside of the gate.
    """
    if block.routing == "softmax":
        return by_softmax
    if block.routing == "scaled softmax":
        return by_scaled_softmax if getattr(gate, "topk_method", None) == "greedy" else None
    groups = getattr(gate, "num_group", None)
    all_taken = groups is not None and groups == getattr(gate, "topk_group", None)
    return by_sigmoid if all_taken else None


def by_softmax(gate: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Routes by the softmax of logits."""
    logits = F.linear(hidden_states.flatten(0, -2), gate.weight)
    # Some always divide by the sum and have no attribute for it, such as Mixtral.
    renormalize = bool(getattr(gate, "norm_topk_prob", True))
    weights, experts = cuda_ops.moe_route(logits, gate.top_k, renormalize=renormalize)
    return logits, weights, experts


def by_scaled_softmax(gate: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Routes by the softmax of float32 logits times a factor."""
    logits = _wide_logits(gate, hidden_states)
    weights, experts = cuda_ops.moe_route(logits, gate.top_k, renormalize=False)
    return logits, weights * gate.routed_scaling_factor, experts


def by_sigmoid(gate: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Routes by sigmoids of float32 logits times a factor; a bias takes part in the choice."""
    logits = _wide_logits(gate, hidden_states)
    weights, experts = cuda_ops.moe_route(
        logits, gate.top_k, "sigmoid", bool(gate.norm_topk_prob), gate.e_score_correction_bias
    )
    return logits, weights * gate.routed_scaling_factor, experts


def _wide_logits(gate: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden_states.flatten(0, -2).float(), gate.weight.float())


#: The tensors of a gate that each needs.
TENSORS: dict[Route, set[str]] = {
    by_softmax: {"gate.weight"},
    by_scaled_softmax: {"gate.weight"},
    by_sigmoid: {"gate.weight", "gate.e_score_correction_bias"},
}
