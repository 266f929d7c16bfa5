"""``silu``: its reference is PyTorch's own, and PyTorch is its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from cuda_ops import derive
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return F.silu if op.name == "silu" else None


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    if op.name != "silu":
        return None
    return derive.with_peers(derive.cuda_ops_benchmarks(op), {"torch": F.silu})
