"""``fused_relu_scale``: its peer is the chain of PyTorch operators that it fuses."""

from __future__ import annotations

import torch

from cuda_ops import derive
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    peer = chain_backward if op.name == "fused_relu_scale_backward" else chain
    return derive.with_peers(derive.cuda_ops_benchmarks(op), torch_peers(peer))


def chain(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Two kernels, twice the bytes."""
    return torch.relu(x) * alpha


def chain_backward(grad_out: torch.Tensor, x: torch.Tensor, alpha: float) -> torch.Tensor:
    """What autograd runs for :func:`chain`, from the input instead of the saved output."""
    grad_x: torch.Tensor = torch.ops.aten.threshold_backward(grad_out * alpha, x, 0)
    return grad_x
