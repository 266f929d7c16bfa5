"""``silu_and_mul``: composed of PyTorch's own operators it is its own reference and peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from cuda_ops import derive
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec


def composed(x: torch.Tensor) -> torch.Tensor:
    """What SwiGLU layers write without a fused operator."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return composed if op.name == "silu_and_mul" else None


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    if op.name != "silu_and_mul":
        return None
    return derive.with_peers(derive.cuda_ops_benchmarks(op), torch_peers(composed))
