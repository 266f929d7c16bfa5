"""Shapes, strides and dtypes of results: the rules of ``src/utils/elementwise.h``."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cuda_ops.derive.arguments import group_of, loop_dims, tensor_arguments
from cuda_ops.derive.checks import check_arguments, check_equal, dims_text, refusal, refuse
from cuda_ops.derive.sizes import Dims, is_true, shape_name
from cuda_ops.signature import Signature, factor_and_name
from cuda_ops.spec import OpSpec


def broadcast(op: OpSpec, tensors: Sequence[Any]) -> list[Any]:
    """Returns the shape that the loop dims of an operator's tensor arguments broadcast to.

    Args:
        op: the operator.
        tensors: for each of its tensor arguments an object with a ``shape``, or ``None``.

    Raises:
        RuntimeError: ``cuda_ops::<op>: argument '<arg>': expected dims '...' of (..., k, n) to
            broadcast with [2], got shape [3, 4, 5]``.
    """
    result: list[Any] = []
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        loop = loop_dims(op, i, tensor.shape)
        refusal = partial(_no_broadcast, op, i, tensor.shape, list(result))
        result[:0] = [1] * (len(loop) - len(result))
        for d, actual in enumerate(loop, start=len(result) - len(loop)):
            if is_true(result[d] == 1):
                result[d] = actual
            elif not is_true(actual == 1):
                check_equal(actual, result[d], refusal)
    return result


def _no_broadcast(op: OpSpec, index: int, shape: Dims, before: Dims) -> str:
    name = op.argument_names[op.tensor_positions[index]]
    listed = dims_text(group_of(op, index))
    expected = f"dims '...' of {listed} to broadcast with {shape_name(before)}"
    return refusal(op, name, expected, f"shape {shape_name(shape)}")


def output_shapes(
    op: OpSpec, signature: Signature, tensors: Sequence[torch.Tensor | None], bound: dict[str, Any]
) -> list[list[Any]]:
    """Returns one shape per output: loop dims broadcast, core dims from ``bound``."""
    loop = tuple(broadcast(op, tensors))
    for group in signature.outputs:
        for dim in group.core:
            if factor_and_name(dim)[1] not in ("", *bound):
                raise RuntimeError(
                    f"{op.qualname}: output dim '{dim}' is a dim of an argument that is None"
                )
    return [list(group.shape(loop, bound)) for group in signature.outputs]


def empty_outputs(
    op: OpSpec, signature: Signature, values: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """Checks the arguments, one value for each, and allocates every output as the C++ side does.

    Contiguous, except that an elementwise operator whose inputs share one
    dense layout keeps it. The device is the first tensor's, or what the Device argument says
    where there is no tensor; the dtype is the first tensor's unless the binding says otherwise.
    """
    bound, tensors = check_arguments(op, values), tensor_arguments(op, values)
    if op.written:
        _check_written(op, tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    given = {
        name: value.dtype if isinstance(value, torch.Tensor) else value
        for name, value in zip(op.argument_names, values, strict=True)
        if isinstance(value, (torch.Tensor, torch.dtype))
    }
    dtypes = op.output_dtypes(given)
    if (position := op.device_position) is not None:
        device = values[position]
    else:
        first, device = present[0], present[0].device
        shaping = [
            tensor
            for name, tensor in zip(op.tensor_names, tensors, strict=True)
            if tensor is not None and name != op.random
        ]
        same = is_elementwise(op) and all(_same_layout(first, other) for other in shaping[1:])
        if same and is_dense(first):
            shape, strides = first.shape, first.stride()
            return tuple(
                torch.empty_strided(shape, strides, dtype=d, device=device) for d in dtypes
            )
    shapes = output_shapes(op, signature, tensors, bound)
    made = zip(shapes, dtypes, strict=True)
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in made)


def is_elementwise(op: OpSpec) -> bool:
    """Says whether tensors other than a random key have loop dims only."""
    assert op.signature is not None
    named = zip(op.tensor_names, op.signature.inputs, strict=True)
    inputs = [group for name, group in named if name != op.random]
    return Signature(tuple(inputs), op.signature.outputs).is_elementwise


def _check_written(op: OpSpec, tensors: Sequence[torch.Tensor | None]) -> None:
    """Refuses a tensor to write whose loop dims are not all of those that the tensors have."""
    loop = broadcast(op, tensors)
    for k, (position, tensor) in enumerate(zip(op.tensor_positions, tensors, strict=True)):
        if tensor is None or position not in op.written:
            continue
        group, own = group_of(op, k), loop_dims(op, k, tensor.shape)
        whole = len(own) == len(loop) and all(map(is_true, map(operator.eq, own, loop)))
        if group.loops and not whole:
            expected = f"dims '...' of {dims_text(group)} to be {shape_name(loop)}"
            got = f"shape {shape_name(tensor.shape)}"
            refuse(op, op.argument_names[position], f"{expected}, as the operator writes it", got)


def is_dense(tensor: torch.Tensor) -> bool:
    """Says whether every element of the storage span is used exactly once."""
    if tensor.is_contiguous():
        return True
    kept = [
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if not is_true(size == 1)
    ]
    expected: Any = 1
    while kept:
        at = next((i for i, (stride, _) in enumerate(kept) if is_true(stride == expected)), None)
        if at is None:
            return False
        expected = expected * kept.pop(at)[1]
    return True


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dim() != b.dim():
        return False
    pairs = [*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True)]
    return all(is_true(x == y) for x, y in pairs)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` (..., n) as (rows, n), where n may be 0; as it is if it has two dims."""
    if tensor.dim() == 2:
        return tensor
    # Not flatten, for which torch has no rule where gradients are computed several at once.
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
