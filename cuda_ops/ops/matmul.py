"""``matmul``: what a signature line cannot say.

Autocast runs it in the lower precision, as torch runs its own; its gradient is
two matrix products, of which only the wanted ones are computed; its shape
follows without walking over named dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops import derive, shapes
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import AutocastPolicy, Autograd, BenchmarkCase, OpSpec


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any] | None:
    if op.name != "matmul":
        return None

    def fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.check_arguments(op, [a, b])
        loop = shapes.broadcast(op, [a.shape, b.shape], (2, 2))
        return a.new_empty((*loop, a.shape[-2], b.shape[-1]))

    return fake


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    if op.name != "matmul":
        return None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad_a = op.function(grad_out, b.mT) if ctx.needs_input_grad[0] else None
        grad_b = op.function(a.mT, grad_out) if ctx.needs_input_grad[1] else None
        # Where batch dims broadcast, autograd sums the result to the input's shape.
        return grad_a, grad_b

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    return "lower_precision"


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return torch.matmul if op.name == "matmul" else None


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    if op.name != "matmul":
        return None
    return derive.with_peers(derive.cuda_ops_benchmarks(op), {"torch": torch.matmul})
