"""``matmul``: what a signature line cannot say.

Autocast runs it in the lower precision, as torch runs its own; its gradient is
two matrix products, of which only the wanted ones are computed; its shape
follows without walking over named dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops import shapes
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.benchmarking.rotation import maker
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import AutocastPolicy, Autograd, BenchmarkCase, OpSpec, Peer


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
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    return torch_peers(torch.matmul if op.name == "matmul" else torch_backward)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    backward = op.name == "matmul_backward"
    dtypes = (torch.bfloat16, torch.float32)
    return [_case(*point, dtype, backward) for dtype in dtypes for point in _POINTS]


#: M, N, K and why.
_POINTS = (
    (256, 256, 256, "far too small to fill a GPU"),
    (1024, 1024, 1024, "one wave of tiles on a large GPU"),
    (4096, 4096, 4096, "compute alone"),
    (4096, 14336, 4096, "Llama-3 8B, up projection of 4096 tokens"),
    (16, 14336, 4096, "the same for 16 tokens: weights are streamed"),
)


def _case(m: int, n: int, k: int, reason: str, dtype: torch.dtype, backward: bool) -> BenchmarkCase:
    a, b, out = ((m, k), dtype), ((k, n), dtype), ((m, n), dtype)
    numel = m * k + k * n
    return BenchmarkCase(
        f"{m}x{n}x{k} {str(dtype).removeprefix('torch.')}",
        maker((out, a, b) if backward else (a, b)),
        # The gradient reads three matrices, writes two and multiplies twice.
        bytes=(numel * (1 + backward) + m * n) * dtype.itemsize,
        flops=2 * m * n * k * (1 + backward),
        reason=reason,
        dtype=dtype,
    )


def torch_backward(
    grad_out: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What autograd runs for ``torch.matmul`` of two matrices."""
    return grad_out @ b.mT, a.mT @ grad_out
