"""What this package tells cuda_ops: where its operators are, what they compute, what to time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec

OP = "cuda_ops_leaky::leaky_clip"
SLOPE, LIMIT = 0.1, 6.0


@hookimpl
def cuda_ops_roots() -> Iterable[Path]:
    return [Path(__file__).parent / "src"]


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    # An installed plugin is asked about every operator of every namespace.
    return torch_leaky_clip if op.key == OP else None


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    return [_case(*point) for point in _POINTS] if op.key == OP else None


_POINTS = (
    (2**16, "the launch is most of it"),
    (2**20, "inside the cache"),
    (2**26, "memory bandwidth"),
)


def _case(numel: int, reason: str) -> BenchmarkCase:
    from cuda_ops.benchmarking.peers import torch_peers

    def inputs(device: torch.device) -> tuple[Any, ...]:
        return torch.randn(numel, device=device, dtype=torch.bfloat16), SLOPE, LIMIT

    return BenchmarkCase(
        label=f"bfloat16 {numel}",
        make_inputs=inputs,
        bytes=2 * numel * 2,  # x in, out out
        flops=2 * numel,
        peers=torch_peers(torch_leaky_clip),
        reason=reason,
        dtype=torch.bfloat16,
    )


def torch_leaky_clip(x: torch.Tensor, slope: float, limit: float) -> torch.Tensor:
    """The same with torch's own operators: two kernels, twice the bytes."""
    return torch.nn.functional.leaky_relu(x, slope).clamp(max=limit)
