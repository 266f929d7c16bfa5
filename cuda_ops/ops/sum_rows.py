"""``sum_rows``: its gradient is a view, and a sharded row is summed where it lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive import rules
from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _tuned
from cuda_ops.spec import (
    AutocastPolicy,
    Autograd,
    BenchmarkCase,
    Candidates,
    OpSpec,
    Peer,
    ShardingRule,
)

if TYPE_CHECKING:
    from cuda_ops.testing.samples import Sample


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd:
    """Makes the gradient a broadcast view, as torch does: no kernel, no memory, differentiable."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.shape = inputs[0].shape

    def backward(ctx: Any, grad_out: torch.Tensor) -> torch.Tensor:
        return grad_out.unsqueeze(-1).expand(ctx.shape)

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy:
    return "float32"


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]] | None:
    """Adds to the derived placements that shards of rows give partial sums."""
    derived = rules.cuda_ops_sharding(op)
    if derived is None:
        return None

    def rule(x: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Partial, Shard

        return [*derived(x), ([Partial()], [Shard(len(x.shape) - 1)])]

    return rule


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return torch_sum


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns long rows, each for one block or for several, along memory and across it."""
    from cuda_ops.testing.samples import Sample, TensorArg

    return [
        Sample((x,))
        for dtype in (torch.float32, torch.bfloat16)
        for x in (
            TensorArg((3, 20_000), dtype),
            TensorArg((2, 200_000), dtype, "offset"),
            TensorArg((40, 20_000), dtype, "transposed"),
        )
    ]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(torch_sum)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    return [_case(*point, dtype) for dtype in (torch.float32, torch.bfloat16) for point in _POINTS]


@hookimpl
def cuda_ops_candidates(op: OpSpec) -> Candidates:
    return Candidates(_tuned.SUMS, _tuned.row_sizes)


@hookimpl
def cuda_ops_op_loaded(op: OpSpec, library: Path) -> None:
    _tuned.use_stored(op, library)


#: Rows, their length and why.
_POINTS = (
    (1 << 22, 8, "a vector or two a row"),
    (1 << 20, 31, "no row starts aligned"),
    (1 << 18, 256, "short rows"),
    (1 << 16, 1000, "the classes of an image network"),
    (1 << 12, 1 << 14, "hidden states of many tokens"),
    (32, 1 << 21, "fewer rows than multiprocessors"),
    (1, 1 << 26, "one very long row"),
)


def _case(rows: int, n: int, reason: str, dtype: torch.dtype) -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import maker

    return BenchmarkCase(
        f"{rows}x{n} {str(dtype).removeprefix('torch.')}",
        maker((((rows, n), dtype),)),
        bytes=rows * (n + 1) * dtype.itemsize,
        flops=rows * n,
        reason=reason,
        dtype=dtype,
        arithmetic="fp32",
    )


def torch_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.sum(x, -1)
