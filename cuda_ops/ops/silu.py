"""``silu``: its reference is PyTorch's own, and PyTorch is its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from cuda_ops import derive
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return F.silu if op.name == "silu" else None


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    peer = torch_silu_backward if op.name == "silu_backward" else F.silu
    return derive.with_peers(derive.cuda_ops_benchmarks(op), torch_peers(peer))


def torch_silu_backward(grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """PyTorch's own kernel, with the arguments in its order."""
    grad_x: torch.Tensor = torch.ops.aten.silu_backward(grad_out, x)
    return grad_x
