"""``silu_and_mul``: composed of PyTorch's own operators it is its own reference and peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import OpSpec, Peer


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return composed if op.name == "silu_and_mul" else None


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    return torch_peers(composed if op.name == "silu_and_mul" else composed_backward)


def composed(x: torch.Tensor) -> torch.Tensor:
    """What SwiGLU layers write without a fused operator."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def composed_backward(grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What autograd runs for it."""
    gate, up = x.chunk(2, dim=-1)
    grad_gate = torch.ops.aten.silu_backward(grad_out * up, gate)
    return torch.cat([grad_gate, grad_out * F.silu(gate)], dim=-1)
