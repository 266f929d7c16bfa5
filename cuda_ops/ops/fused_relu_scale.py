"""``fused_relu_scale``: its gradient is linear, and PyTorch's two operators are its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd, OpSpec, Peer


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """Differentiates the gradient: the same mask and factor again, and zeros for ``x``."""
    if op.name != "fused_relu_scale_backward":
        return None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        _, x, ctx.alpha = inputs
        ctx.save_for_backward(x)

    def backward(ctx: Any, grad_grad_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        grad_grad_out = op.function(grad_grad_x, x, ctx.alpha) if wanted[0] else None
        grad_x = torch.zeros_like(grad_grad_x) if wanted[1] else None
        return grad_grad_out, grad_x, None

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(composed if op.name == "fused_relu_scale" else composed_backward)


def composed(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Runs two kernels, which move twice the bytes."""
    return torch.relu(x) * alpha


def composed_backward(grad_out: torch.Tensor, x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Runs what autograd runs for it, from the input instead of the saved output."""
    grad_x: torch.Tensor = torch.ops.aten.threshold_backward(grad_out * alpha, x, 0)
    return grad_x
