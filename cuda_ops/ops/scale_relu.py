"""``scale_relu``: composed of PyTorch operators, so its peer is the same chain from Python."""

from __future__ import annotations

import torch

from cuda_ops import derive
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    return derive.with_peers(derive.cuda_ops_benchmarks(op), torch_peers(chain))


def chain(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What it is composed of."""
    return torch.relu(x * scale + 1)
