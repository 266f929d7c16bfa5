"""``add``: its gradient is the incoming one, which needs no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd, OpSpec, Peer


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        pass

    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Where an input was broadcast, autograd sums to its shape.
        return tuple(grad_out if wanted else None for wanted in ctx.needs_input_grad)

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return torch.add


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(torch.add)
