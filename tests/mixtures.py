"""What tests of moe compare with: matrices of experts, and a naive mixture."""

from __future__ import annotations

from typing import Any

import torch

from cuda_ops.ops import _moe as references

ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def weights(
    count: int, hidden: int, inner: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(count, 2 * inner, hidden) / hidden**0.5
    down = torch.randn(count, hidden, inner) / inner**0.5
    return gate_up.to(device, dtype), down.to(device, dtype)


def naive(x: torch.Tensor, logits: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    gate_up, down, top_k = rest
    scoring = references.SCORINGS.index(options.pop("scoring", "softmax"))
    chosen = references.route(
        logits, top_k, scoring, options.get("renormalize", True), options.get("expert_bias")
    )
    return references.mixture(x, gate_up, down, chosen[1], chosen[0])


def drawn(sizes: tuple[int, ...], seed: int) -> tuple[Any, ...]:
    """Tokens, logits, matrices and top_k of (T, H, I, E, k)."""
    tokens, hidden, inner, count, top_k = sizes
    torch.manual_seed(seed)
    x, logits = (torch.randn(tokens, n, dtype=torch.float64) for n in (hidden, count))
    return x, logits, *weights(count, hidden, inner), top_k
