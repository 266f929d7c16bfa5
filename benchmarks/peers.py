"""Peers of the operators that have no Python file of their own, from outside: as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops import derive
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec


def relu_scale(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Two kernels, twice the bytes."""
    return torch.relu(x) * alpha


def relu_scale_backward(grad_out: torch.Tensor, x: torch.Tensor, alpha: float) -> torch.Tensor:
    """What autograd runs for :func:`relu_scale`, from the input instead of the saved output."""
    grad_x: torch.Tensor = torch.ops.aten.threshold_backward(grad_out * alpha, x, 0)
    return grad_x


def scale_relu(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What the operator is composed of."""
    return torch.relu(x * scale + 1)


CHAINS: dict[str, Callable[..., Any]] = {
    "fused_relu_scale": relu_scale,
    "fused_relu_scale_backward": relu_scale_backward,
    "scale_relu": scale_relu,
}


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    if op.name not in CHAINS:
        return None
    return derive.with_peers(derive.cuda_ops_benchmarks(op), torch_peers(CHAINS[op.name]))
