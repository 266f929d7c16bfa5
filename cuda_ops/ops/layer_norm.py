"""``layer_norm``: weights may be float32 where x is a half; torch's own is the peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _norms
from cuda_ops.spec import BenchmarkCase, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    return _norms.fake(op)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[Sample] | None:
    return _norms.samples(op)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return torch_layer_norm if op.name == "layer_norm" else None


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    return _norms.kernel_samples(op)


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer] | None:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(torch_layer_norm) if op.name == "layer_norm" else None


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    return _norms.cases(op, moved=2) if op.name == "layer_norm" else None


def torch_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)
