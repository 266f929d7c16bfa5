"""``silu_and_mul``: a composition of PyTorch's operators is its reference and its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd, OpSpec, Peer


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """Differentiates the gradient with torch's operators: rarely wanted, but then to any order."""
    if op.name != "silu_and_mul_backward":
        return None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad_grad_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dtype = grad_grad_x.dtype
        # As in the kernels, half types are rounded once, at the end.
        wide = torch.promote_types(dtype, torch.float32)
        grad_out, x, along = (t.to(wide) for t in (*ctx.saved_tensors, grad_grad_x))
        (gate, up), (along_gate, along_up) = x.chunk(2, dim=-1), along.chunk(2, dim=-1)
        s = gate.sigmoid()
        slope = s * (1 + gate * (1 - s))
        grad_grad_out = grad_x = None
        if ctx.needs_input_grad[0]:
            grad_grad_out = (along_gate * up * slope + along_up * gate * s).to(dtype)
        if ctx.needs_input_grad[1]:
            bend = s * (1 - s) * (2 + gate * (1 - 2 * s))
            grad_gate = grad_out * (along_gate * up * bend + along_up * slope)
            grad_up = grad_out * along_gate * slope
            grad_x = torch.cat([grad_gate, grad_up], dim=-1).to(dtype)
        return grad_grad_out, grad_x

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return composed if op.name == "silu_and_mul" else None


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    if op.name == "silu_and_mul_jvp":
        return torch_peers(composed_jvp)
    return torch_peers(composed if op.name == "silu_and_mul" else composed_backward)


def composed(x: torch.Tensor) -> torch.Tensor:
    """Runs what SwiGLU layers use without a fused operator."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def composed_jvp(x: torch.Tensor, tangent_x: torch.Tensor) -> torch.Tensor:
    """Runs what forward mode runs for it."""
    (gate, up), (along_gate, along_up) = x.chunk(2, dim=-1), tangent_x.chunk(2, dim=-1)
    along: torch.Tensor = torch.ops.aten.silu_backward(along_gate, gate)
    return along * up + F.silu(gate) * along_up


def composed_backward(grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Runs what autograd runs for it."""
    gate, up = x.chunk(2, dim=-1)
    grad_gate = torch.ops.aten.silu_backward(grad_out * up, gate)
    return torch.cat([grad_gate, grad_out * F.silu(gate)], dim=-1)
