"""``rotary_embedding``: the formula in PyTorch is its reference and its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _rotary
from cuda_ops.spec import BenchmarkCase, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample


@hookimpl
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[Sample] | None:
    return _rotary.samples(op)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    return _rotary.kernel_samples(op)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return _rotary.composed if op.name == "rotary_embedding" else None


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer] | None:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(_rotary.composed) if op.name == "rotary_embedding" else None


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    return _rotary.cases(op) if op.name == "rotary_embedding" else []
