"""What operators along a dim share: it is an argument, which no signature line can say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive.arguments import bind
from cuda_ops.derive.batching import of_no_parts
from cuda_ops.spec import OpSpec, ShardingRule

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import TensorArg


def checked_dim(op: OpSpec, x: torch.Tensor, dim: int) -> int:
    """Returns ``dim`` counted from 0; raises the binding's error if it is out of range."""
    rank = max(1, x.dim())
    if not -rank <= dim < rank:
        raise RuntimeError(
            f"{op.qualname}: argument 'dim': expected a dim from {-rank} to {rank - 1}, got {dim}"
        )
    return dim % rank


def vmap(op: OpSpec, dim_at: int) -> Callable[..., Any]:
    """Makes the mapped dim one more beside the one that the operator works along.

    Args:
        op: the operator.
        dim_at: the position of its argument ``dim``.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        values = bind(op, args, kwargs)
        if info.batch_size == 0:
            return of_no_parts(op.function, values, in_dims)
        front = values[0].movedim(in_dims[0], 0)
        rank = front.dim() - 1
        if rank == 0:  # each one a row of its own
            front = front.unsqueeze(-1)
            values[1:dim_at] = [k or 1 for k in values[1:dim_at]]  # k = 0 keeps the element too
        dim = checked_dim(op, front[0], values[dim_at])
        values[0], values[dim_at] = front, dim + 1
        results = op.function(*values)
        if isinstance(results, torch.Tensor):
            return results.squeeze(-1) if rank == 0 else results, 0
        return tuple(r.squeeze(-1) if rank == 0 else r for r in results), (0,) * len(results)

    return rule


def sharding(op: OpSpec, dim_at: int) -> Callable[..., list[ShardingRule]]:
    """Shards any dim but the one that the operator works along."""

    def rule(*args: Any, **kwargs: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Replicate, Shard

        values = bind(op, args, kwargs)
        rank, rest = len(values[0].shape), [None] * (len(args) + len(kwargs) - 1)
        dim = values[dim_at] % max(1, rank)
        shards = [Shard(d) for d, size in enumerate(values[0].shape) if d != dim and size != 1]
        outputs = len(op.parsed.returns)
        return [([placement] * outputs, [placement, *rest]) for placement in (Replicate(), *shards)]

    return rule


_SIZES = (1, 2, 3, 4, 5, 7, 16, 17, 31, 33, 64, 129, 1025)


def tensors(op: OpSpec) -> st.SearchStrategy[tuple[TensorArg, int]]:
    """Draws a tensor and a dim of it, counted from either side."""
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import LAYOUTS, MAX_NUMEL, TensorArg

    def pair(shape: list[int], dtype: Any, layout: Any, dim: int) -> tuple[TensorArg, int]:
        rank = max(1, len(shape))
        return TensorArg(tuple(shape), dtype, layout), dim % (2 * rank) - rank

    sizes = st.sampled_from((*_SIZES, 0))
    shapes = st.lists(sizes, max_size=4).filter(lambda s: math.prod(s) <= MAX_NUMEL)
    kinds = st.sampled_from(op.dtypes), st.sampled_from(LAYOUTS), st.integers(0, 7)
    return st.builds(pair, shapes, *kinds)
