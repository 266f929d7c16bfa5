"""The batching rule that a signature line gives, and what rules of plugins share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuda_ops.derive.arguments import bind, group_of, rows_are_independent, split
from cuda_ops.derive.checks import bind_dims, check_arguments, refuse
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import OpSpec


@hookimpl(trylast=True)
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any] | None:
    """Makes a mapped dim the outermost loop dim of one call. Calls once for each index where that
    cannot be: a mapped argument or a result has no loop dims, or rows are not independent.
    """
    if op.signature is None or op.is_composite or op.device_position is not None:
        return None
    one_call = rows_are_independent(op) and all(group.loops for group in op.signature.outputs)

    def rule(info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        values = bind(op, args, kwargs)
        mapped = {
            i: in_dims[i]
            for i in op.tensor_positions
            if i < len(in_dims) and in_dims[i] is not None
        }
        listed = {
            i: dims
            for i, dims in enumerate(in_dims)
            if isinstance(dims, (list, tuple)) and any(dim is not None for dim in dims)
        }
        _refuse_unmapped(op, values, mapped | listed)
        groups = {i: group_of(op, k) for k, i in enumerate(op.tensor_positions)}
        sizes: dict[str, Any] = {}
        for i, group in groups.items():  # else a mapped dim could pass for one of a row's
            if values[i] is not None:
                shape = [n for d, n in enumerate(values[i].shape) if mapped.get(i) != d]
                bind_dims(op, op.argument_names[i], group, shape, sizes)
        if listed or not (one_call and all(groups[i].loops for i in mapped)):
            return _call_by_call(op, values, mapped | listed, info.batch_size)
        ranks = {
            i: values[i].dim() - len(group.core) - (i in mapped)
            for i, group in groups.items()
            if values[i] is not None
        }
        rank = max(ranks.values())
        for i, dim in mapped.items():
            front = values[i].movedim(dim, 0)
            missing = [1] * (rank - ranks[i])
            values[i] = front.reshape(front.shape[0], *missing, *front.shape[1:])
        result = _call(op, values)
        return result, tuple(0 for _ in result) if isinstance(result, (tuple, list)) else 0

    return rule


def _call(op: OpSpec, values: Sequence[Any]) -> Any:
    positional, keywords = split(op, values)
    return op.function(*positional, **keywords)


def _refuse_unmapped(op: OpSpec, values: Sequence[Any], mapped: dict[int, Any]) -> None:
    """Refuses to write all parts of a batch to one tensor."""
    for i in op.written:
        dims = mapped.get(i)
        if isinstance(values[i], (list, tuple)):
            dims = dims if isinstance(dims, (list, tuple)) else [dims] * len(values[i])
            missing = any(
                tensor is not None and dim is None
                for tensor, dim in zip(values[i], dims, strict=True)
            )
        else:
            missing = values[i] is not None and dims is None
        if missing:
            others = " and ".join(repr(op.argument_names[k]) for k in mapped)
            expected = f"a tensor that torch.vmap maps like {others}, as the operator writes it"
            refuse(op, op.argument_names[i], expected, "one that it does not map")


def _call_by_call(
    op: OpSpec, values: list[Any], mapped: dict[int, Any], count: int
) -> tuple[Any, Any]:
    """Calls the operator once for each index of the mapped dim; that of a list is a list."""

    def call(*part: Any) -> Any:
        return _call(op, part)

    def selected(value: Any, dim: Any, at: int) -> Any:
        if isinstance(value, (list, tuple)) and dim is not None:
            return [selected(one, d, at) for one, d in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, at)

    def part(at: int) -> list[Any]:
        return [selected(value, mapped.get(i), at) for i, value in enumerate(values)]

    if not count:
        return of_no_parts(call, values, [mapped.get(i) for i in range(len(values))])
    results = [call(*part(at)) for at in range(count)]
    if results[0] is None:
        return None, None
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def check_part(op: OpSpec, values: Sequence[Any], in_dims: Sequence[int | None]) -> None:
    """Checks the first part's arguments, for a batching rule: vmap then refuses what a plain call
    refuses, and no mapped dim passes for another.
    """
    if torch._C._is_tracing():  # by torch.jit: sizes are tensors then
        return
    dims = [*in_dims, *[None] * (len(values) - len(in_dims))]
    check_arguments(
        op, [v if d is None else v.select(d, 0) for v, d in zip(values, dims, strict=True)]
    )


def of_no_parts(
    function: Callable[..., Any], values: Sequence[Any], in_dims: Sequence[int | None]
) -> tuple[Any, Any]:
    """Returns what a batching rule does where the mapped dim has no elements: empty results, shaped
    by one call on zeros.
    """

    def zeros(value: Any, dim: Any) -> Any:
        if isinstance(dim, (list, tuple)):
            return [zeros(one, d) for one, d in zip(value, dim, strict=True)]
        if dim is None:
            return value
        shape = list(value.shape)
        del shape[dim]
        return value.new_zeros(shape)

    dims = [*in_dims, *[None] * (len(values) - len(in_dims))]
    results = function(*map(zeros, values, dims))
    if results is None:
        return None, None
    if isinstance(results, torch.Tensor):
        return results.new_empty((0, *results.shape)), 0
    return tuple(r.new_empty((0, *r.shape)) for r in results), (0,) * len(results)
