"""``cumulative_sum``: the dim is an argument, and the gradient is the same from the other end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive.layout import is_dense
from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _along_dim
from cuda_ops.spec import AutocastPolicy, Autograd, BenchmarkCase, OpSpec, Peer, ShardingRule

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample

#: The position of the argument ``dim``.
_DIM_AT = 1


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    def fake(x: torch.Tensor, dim: int = -1, reverse: bool = False) -> torch.Tensor:
        _along_dim.checked_dim(op, x, dim)
        dtype = torch.int64 if x.dtype is torch.int32 else x.dtype
        if is_dense(x):
            return x.new_empty_strided(x.shape, x.stride(), dtype=dtype)
        return x.new_empty(x.shape, dtype=dtype)

    return fake


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.arguments = len(inputs)
        ctx.dim = inputs[_DIM_AT]
        ctx.reverse = inputs[2]

    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        grad_x = op.function(grad_out, ctx.dim, not ctx.reverse)
        return (grad_x, *[None] * (ctx.arguments - 1))

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy:
    return "float32"


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any]:
    return _along_dim.vmap(op, _DIM_AT)


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]]:
    return _along_dim.sharding(op, _DIM_AT)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return torch_cumulative_sum


def torch_cumulative_sum(x: torch.Tensor, dim: int = -1, reverse: bool = False) -> torch.Tensor:
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample
    from cuda_ops.testing.values import VALUES

    def sample(drawn: tuple[Any, int], reverse: bool, values: Any, seed: int) -> Sample:
        return Sample((*drawn, reverse), values, seed)

    values, seeds = st.sampled_from(VALUES), st.integers(0, 2**16)
    return st.builds(sample, _along_dim.tensors(op), st.booleans(), values, seeds)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns lines that a block holds, several of them or a part of one, for each kernel."""
    from cuda_ops.testing.samples import Sample, TensorArg

    return [
        Sample((x, dim, reverse))
        for dtype in (torch.float32, torch.bfloat16)
        for x, dim, reverse in (
            (TensorArg((300, 31), dtype), -1, False),
            (TensorArg((3, 4100), dtype, "sliced"), -1, True),
            (TensorArg((2, 100_000), dtype), -1, False),
            (TensorArg((1, 60_001), dtype, "offset"), -1, True),
            (TensorArg((2, 700, 40), dtype), 1, False),
            (TensorArg((9000, 16), dtype), 0, True),
            (TensorArg((9000, 33), dtype), 0, False),
        )
    ] + [Sample((TensorArg((3, 20_000), torch.int32), -1, False))]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(torch_cumulative_sum)


#: Shapes, the dim and why.
_POINTS: tuple[tuple[tuple[int, ...], int, str], ...] = (
    ((1 << 20, 31), -1, "short rows that start nowhere in particular"),
    ((1 << 17, 256), -1, "short rows"),
    ((1 << 12, 1 << 13), -1, "rows of a block"),
    ((1 << 9, 1 << 16), -1, "rows of several blocks"),
    ((1, 1 << 20), -1, "one row of a few MB"),
    ((1, 1 << 26), -1, "one long row"),
    ((1 << 13, 1 << 12), 0, "columns"),
    ((1 << 9, 1 << 8, 1 << 8), 1, "columns of many images"),
    ((1 << 22, 8), 0, "few long columns"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    return [_case(*point, dtype) for dtype in dtypes for point in _POINTS]


def _case(shape: tuple[int, ...], dim: int, reason: str, dtype: torch.dtype) -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import maker

    numel = torch.Size(shape).numel()
    name = "x".join(map(str, shape)) + (f" along {dim}" if dim >= 0 else "")
    return BenchmarkCase(
        f"{name} {str(dtype).removeprefix('torch.')}",
        maker(((shape, dtype), dim)),
        bytes=2 * numel * dtype.itemsize,
        reason=reason,
        dtype=dtype,
    )
