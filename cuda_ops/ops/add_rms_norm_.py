"""``add_rms_norm_``: two of torch's operators are its reference and its peer."""

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
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return composed


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    return _norms.kernel_samples(op)


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(composed)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    return _norms.cases(op, moved=4, training=False)


def composed(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    residual.add_(x)
    x.copy_(F.rms_norm(residual, weight.shape, weight, eps))
