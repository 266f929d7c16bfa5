"""``relu``: PyTorch's own is its reference and its peer, and its gradient is linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd, OpSpec, Peer


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """Differentiates the gradient: the same mask again, and zeros for ``out``, as torch does."""
    if op.name != "relu_backward":
        return None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.save_for_backward(inputs[1])

    def backward(ctx: Any, grad_grad_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        grad_grad_out = op.function(grad_grad_x, out) if ctx.needs_input_grad[0] else None
        grad_of_out = torch.zeros_like(grad_grad_x) if ctx.needs_input_grad[1] else None
        return grad_grad_out, grad_of_out

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return torch.relu if op.name == "relu" else None


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    peer = threshold_backward if op.name == "relu_backward" else torch.relu
    return torch_peers(peer)


def threshold_backward(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Runs PyTorch's own gradient of relu."""
    grad_x: torch.Tensor = torch.ops.aten.threshold_backward(grad_out, out, 0)
    return grad_x
