"""``silu``: its reference is PyTorch's own, and PyTorch is its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import OpSpec, Peer


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return F.silu if op.name == "silu" else None


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer] | None:
    from cuda_ops.benchmarking.peers import torch_peers

    theirs: dict[str, Callable[..., Any]] = {"silu": F.silu, "silu_backward": torch_silu_backward}
    return torch_peers(theirs[op.name]) if op.name in theirs else None


def torch_silu_backward(grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Runs PyTorch's own kernel."""
    grad_x: torch.Tensor = torch.ops.aten.silu_backward(grad_out, x)
    return grad_x
