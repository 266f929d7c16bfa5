"""cuda_ops inside other people's models."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

import cuda_ops


def use_moe(block: torch.nn.Module) -> torch.nn.Module:
    """Have a sparse block of Hugging Face's Mixtral, Qwen3-MoE or OLMoE run :func:`cuda_ops.moe`.

    Its parameters stay what and where they are. Only a block that routes by softmax, from
    ``gate.weight`` (E, H), to SwiGLU experts whose matrices are stacked as ``experts.gate_up_proj``
    (E, 2I, H) and ``experts.down_proj`` (E, H, I), is of that kind.

    Args:
        block: ``MixtralSparseMoeBlock``, ``Qwen3MoeSparseMoeBlock`` or ``OlmoeSparseMoeBlock``.

    Returns:
        The block, changed in place. Its forward returns the tokens alone.

    Raises:
        ValueError: the block lacks one of these, or its activation is another than silu.
    """
    gate, experts = getattr(block, "gate", None), getattr(block, "experts", None)
    found = {
        "gate.weight": getattr(gate, "weight", None),
        "experts.gate_up_proj": getattr(experts, "gate_up_proj", None),
        "experts.down_proj": getattr(experts, "down_proj", None),
    }
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"use_moe: expected a tensor {name} in {type(block).__name__}")
    activation = getattr(experts, "act_fn", None)
    probe = torch.linspace(-4, 4, 9)
    if activation is None or not torch.allclose(activation(probe), F.silu(probe)):
        raise ValueError(f"use_moe: expected experts with silu in {type(block).__name__}")
    top_k = getattr(gate, "top_k", None) or getattr(block, "top_k", None)
    if not isinstance(top_k, int):
        raise ValueError(f"use_moe: expected a number top_k in {type(block).__name__}")
    # Mixtral always divides by the sum and has no word for it.
    renormalize = bool(getattr(gate, "norm_topk_prob", getattr(block, "norm_topk_prob", True)))

    def forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        logits = F.linear(hidden_states, self.gate.weight)
        experts = self.experts
        out: torch.Tensor = cuda_ops.moe(
            hidden_states,
            logits,
            experts.gate_up_proj,
            experts.down_proj,
            top_k,
            renormalize=renormalize,
        )
        return out

    block.forward = MethodType(forward, block)
    return block
