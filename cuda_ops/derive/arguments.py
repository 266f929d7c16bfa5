"""Reads the arguments of a call by schema and signature line: which tensor has which dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cuda_ops.derive.sizes import Dims
from cuda_ops.signature import Group
from cuda_ops.spec import OpSpec, default_of


def bind(op: OpSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns one value per argument of the schema; the dispatcher drops those equal to their
    default.
    """
    values = list(args)
    for argument in op.parsed.arguments[len(values) :]:
        values.append(kwargs.get(argument.name, default_of(argument)))
    return values


def split(op: OpSpec, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the values to pass by position, and those of keyword-only arguments by name."""
    names = [argument.name for argument in op.parsed.arguments if argument.kwarg_only]
    count = len(op.parsed.arguments) - len(names)
    return list(values[:count]), dict(zip(names, values[count:], strict=False))


def tensor_arguments(op: OpSpec, values: Sequence[Any]) -> list[torch.Tensor | None]:
    """Returns the values of type ``Tensor`` and ``Tensor?``: one per group of the line's inputs."""
    return [values[i] for i in op.tensor_positions]


def takes_lists(op: OpSpec) -> bool:
    """Says whether an argument is a list of tensors."""
    return any(map(is_list, op.parsed.arguments))


def is_list(value: Any) -> bool:
    """Says whether an argument or a return of a schema is a list of tensors."""
    return str(value.type).startswith("List") and "Tensor" in str(value.type)


def group_of(op: OpSpec, index: int) -> Group:
    """Returns the dims of the ``index``-th tensor argument; without a line, loop dims alone."""
    groups = op.signature.inputs if op.signature is not None else ()
    return groups[index] if index < len(groups) else Group(())


def loop_dims(op: OpSpec, index: int, shape: Dims) -> Dims:
    """Returns the loop dims of the ``index``-th tensor argument."""
    group = group_of(op, index)
    return shape[: len(shape) - len(group.core)] if group.loops else ()


def rows_are_independent(op: OpSpec) -> bool:
    """Says whether each index of the loop dims is computed on its own, as if there were no other.

    It is not where a result belongs to all rows, nor in the gradient of such a result. The gradient
    of a row's own result is; one in brackets is the sum over the rows. Nor where random numbers
    depend on the place.
    """
    assert op.signature is not None
    if op.random:
        return False
    if not all(group_of(op, k).loops for k, i in enumerate(op.tensor_positions) if i in op.written):
        return False
    forward = op.siblings.get(op.name.removesuffix("_backward"), op)
    if forward.name == op.name or forward.signature is None:
        return all(group.loops for group in op.signature.outputs)
    named = zip(op.output_names, op.signature.outputs, strict=True)
    gradients = all(group.loops or name.startswith("grad_") for name, group in named)
    return gradients and rows_are_independent(forward)
