"""``dropout``: outside of training it returns its argument; torch's own is the peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from cuda_ops.derive.checks import check_flag, refuse
from cuda_ops.derive.random import draw_key
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd, BenchmarkCase, OpSpec, Peer


@hookimpl
def cuda_ops_public(op: OpSpec) -> Callable[..., Any] | None:
    if op.name != "dropout":
        return None

    def dropout(
        x: torch.Tensor, p: float = 0.5, training: bool = True, *, key: torch.Tensor | None = None
    ) -> torch.Tensor:
        check_flag(op, "training", training)
        if not training:
            if not 0 <= p <= 1:
                refuse(op, "p", "from 0 to 1", f"{p}")
            return x
        out: torch.Tensor = op.function(x, draw_key(x) if key is None else key, p)
        return out

    dropout.__doc__ = _DOC
    return dropout


_DOC = """Drops elements of x with probability p and divides the others by 1 - p.

Shapes: x (...); the result has the shape of x, and its layout where x is dense.
Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The arithmetic runs in
float64 for float64 and in float32 for the others.

Args:
    x: any tensor.
    p: the probability, from 0 to 1.
    training: False returns x itself.
    key: two int64 numbers on the device of x, for a mask to use again; without it, the generator
        of that device draws them.

Memory: the key. The gradient makes the same random numbers again, so no mask is stored.
Errors: RuntimeError for an argument that is not a tensor, any other dtype, a p that is not from 0
to 1, or a training that is no bool.
Formula: the element with index i in the order of the dims is 0 if uniform(key, i) < p, with 24 bits
of Philox4x32-10, also where x is infinite or NaN; Srivastava et al.,
https://jmlr.org/papers/v15/srivastava14a.html. Neither the layout nor the device changes the mask
of a key.

Example:
>>> cuda_ops.dropout(torch.ones(6), 0.5, key=torch.tensor([1, 2]))
tensor([2., 2., 0., 0., 2., 2.])
"""


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """Differentiates the gradient, which is linear: the same function of the same key again."""
    if op.name != "dropout_backward":
        return None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, key, ctx.p = inputs
        ctx.save_for_backward(key)

    def backward(ctx: Any, grad_grad_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (key,) = ctx.saved_tensors
        return op.function(grad_grad_x, key, ctx.p), None, None

    return Autograd(setup_context, backward, inputs=(0,))


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    from cuda_ops.testing.philox import random_uniform

    def dropout(x: torch.Tensor, key: torch.Tensor, p: float = 0.5) -> torch.Tensor:
        dropped = random_uniform(key, x.shape) < p
        return torch.where(dropped, 0.0, x / (1 - p)) if p < 1 else torch.zeros_like(x)

    return dropout


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import COMPILE, EAGER, compiled

    if op.name != "dropout":
        return {}  # the reference of the gradient draws with many kernels, which is no fair peer
    # They drop other elements, so their results cannot be compared with the reference's.
    return {
        EAGER: Peer(lambda: torch_dropout, compared=0),
        COMPILE: replace(compiled(torch_dropout), compared=0),
    }


def torch_dropout(x: torch.Tensor, key: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    """Runs PyTorch's own, which draws from its generator and in eager mode writes a mask."""
    return F.dropout(x, p)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    """Draws a key in each call, as the peers do, and drops by the given one, which has a reference.
    The largest sizes are left out, for which the reference would not fit into memory.
    """
    from cuda_ops.benchmarking.derived import cuda_ops_benchmarks

    def drawing(x: torch.Tensor, key: torch.Tensor, p: float = 0.5) -> torch.Tensor:
        draw_key(x)
        out: torch.Tensor = op.function(x, key, p)
        return out

    cases = [case for case in cuda_ops_benchmarks(op) or () if case.bytes < 1 << 32]
    if op.name != "dropout":  # a gradient draws nothing
        return cases
    return [replace(case, function=drawing) for case in cases]
