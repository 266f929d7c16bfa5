"""Samples of other sizes: which an operator takes, and its own samples with one dim changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cuda_ops.derive.arguments import group_of
from cuda_ops.signature import factor_and_name, size_of
from cuda_ops.spec import OpSpec
from cuda_ops.testing.samples import Sample, TensorArg

#: The outermost dim of all tensors that have loop dims.
ROWS = "rows"


def resizable(op: OpSpec) -> list[str]:
    """Returns the dims of an operator whose sizes may be chosen: core dims, and rows."""
    return [*op.drawn_dims, *([ROWS] if op.tensor_positions else [])]


def within_ranges(op: OpSpec, core: Mapping[str, int]) -> bool:
    """Tells whether the operator says of no core dim that it takes other sizes."""
    if any(name in op.ranges and size not in op.ranges[name] for name, size in core.items()):
        return False
    limits = op.dim_limits.items()
    known = [(core[dim], times, core[limit]) for dim, (times, limit) in limits
             if dim in core and limit in core]  # fmt: skip
    return all(size <= most // times for size, times, most in known)


def resized(op: OpSpec, sample: Sample, dim: str, size: int) -> Sample | None:
    """Returns the sample with another size of a core dim or of ``ROWS``, in each tensor that has
    it; ``None`` if none has, or the operator takes no such size. For operators whose arguments the
    signature line alone does not make, since only their own samples know which values they take.
    """
    if op.signature is None or not within_ranges(op, {dim: size}):
        return None
    args, found = list(sample.args), False
    for k, i in enumerate(op.tensor_positions):
        arg = args[i] if i < len(args) else None
        if not isinstance(arg, TensorArg):
            continue
        group, shape = group_of(op, k), list(arg.shape)
        loops = len(shape) - len(group.core)
        for place, core in enumerate(group.core, loops):
            if factor_and_name(core)[1] == dim:
                shape[place] = size_of(core, {dim: size})
        if dim == ROWS and group.loops and loops:
            shape[0] = size
        if tuple(shape) == arg.shape:
            continue
        if arg.distinct:  # there may be too few different ones
            return None
        args[i], found = replace(arg, shape=tuple(shape)), True
    for i, name in enumerate(op.argument_names):
        if name == dim and i < len(args) and isinstance(args[i], int):
            args[i], found = size, True
    return replace(sample, args=tuple(args)) if found else None


def grown(op: OpSpec, sample: Sample, sizes: Mapping[str, Any]) -> list[Sample]:
    """Returns the sample with each dim of a size in turn, as far as it has such dims."""
    made = (resized(op, sample, dim, size) for dim, each in sizes.items() for size in each)
    return [one for one in made if one is not None]
