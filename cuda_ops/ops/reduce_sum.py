"""``reduce_sum``: what follows from its being a sum, which a signature line cannot say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive import checks
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
        return grad_out.expand(ctx.shape)

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy:
    return "float32"


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any]:
    """Takes one sum per index of the mapped dim. It is torch's own sum of rows, so that this
    operator does not need another one of this project.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor) -> tuple[torch.Tensor, int]:
        checks.check_arguments(op, [x])
        return x.movedim(in_dims[0], 0).unsqueeze(-1).flatten(1).sum(1), 0

    return rule


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]]:
    """Makes shards of any dim give partial sums."""

    def rule(x: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        shards = [([Partial()], [Shard(d)]) for d, size in enumerate(x.shape) if size != 1]
        return [([Replicate()], [Replicate()]), *shards]

    return rule


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return torch_sum


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns tensors for several blocks, whose sums are added by one block or by several."""
    from cuda_ops.testing.samples import Sample, TensorArg

    return [
        Sample((x,))
        for dtype in (torch.float32, torch.bfloat16)
        for x in (
            TensorArg((200_000,), dtype),
            TensorArg((200_000,), dtype, "stepped"),
            TensorArg((6000, 40), dtype, "sliced"),
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
    return Candidates(_tuned.SUMS, _sizes)


@hookimpl
def cuda_ops_op_loaded(op: OpSpec, library: Path) -> None:
    _tuned.use_stored(op, library)


def _sizes(x: torch.Tensor) -> tuple[int, int] | None:
    """Takes a dense tensor as the one row that it is; others are not tuned."""
    spans = ((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (1, x.numel()) if x.numel() and sum(spans) + 1 == x.numel() else None


#: Elements and why.
_POINTS = (
    (1 << 10, "the launch is the whole cost"),
    (1 << 16, "one block would be slow, many need a second launch"),
    (1 << 20, "inside any cache"),
    (1 << 24, "beyond the cache, launches still visible"),
    (1 << 28, "memory bandwidth alone"),
    (1 << 30, "half of what 32 bits count"),
)


def _case(numel: int, reason: str, dtype: torch.dtype) -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import maker

    return BenchmarkCase(
        f"{numel} {str(dtype).removeprefix('torch.')}",
        maker((((numel,), dtype),)),
        bytes=numel * dtype.itemsize,
        flops=numel,
        reason=reason,
        dtype=dtype,
        arithmetic="fp32",
    )


def torch_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.sum(x)
