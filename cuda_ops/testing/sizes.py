"""Samples of given sizes: made by the signature line, or an operator's own with one dim changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cuda_ops.derive.arguments import group_of
from cuda_ops.signature import Group, factor_and_name, size_of
from cuda_ops.spec import OpSpec, Range, default_of, is_device
from cuda_ops.testing.arguments import sampled_arguments
from cuda_ops.testing.samples import (
    LAYOUTS,
    LOOP_DIMS,
    OVERLAPPING,
    DeviceArg,
    Layout,
    Sample,
    TensorArg,
    layouts_of,
    limited,
    within_limit,
)


def shaped(
    op: OpSpec,
    loop: tuple[int, ...],
    *,
    core: Mapping[str, int] | int = 5,
    dtype: torch.dtype | None = None,
    layout: Layout = "contiguous",
    seed: int = 0,
) -> Sample:
    """Returns one call of a given size: every tensor has these loop dims, and ordinary values.

    Args:
        op: an operator; without a signature line it has loop dims alone.
        loop: the loop dims of all tensors.
        core: the size of each core dim by name, and of those that ints give results alone; or the
            first size, after which each is one larger. Each as far as the operator's ranges go.
        dtype: the dtype of all tensors; by default float32 if the operator takes it.
        layout: the layout of all tensors.
        seed: the seed of the values.
    """
    inputs, names = (Group(()),) * len(op.tensor_positions), op.drawn_dims
    if op.signature is not None:
        inputs = op.signature.inputs
    if isinstance(core, int):
        core = {d: core + i for i, d in enumerate(names)}
    ranges = {d: op.ranges.get(d, Range(0, size)) for d, size in core.items()}
    within = {d: min(max(size, ranges[d].least), ranges[d].most) for d, size in core.items()}
    sizes = limited(op, within)
    groups = iter(inputs)

    def tensor(name: str) -> TensorArg:
        shape = next(groups).shape(loop, sizes)
        below = sizes.get(op.belows.get(name, ""))
        return TensorArg(shape, example_dtype(op, name, dtype), layout, below)

    def scalar(argument: Any) -> Any:
        is_size = op.signature is not None and argument.name in op.signature.int_names
        is_size &= argument.name in sizes
        value = sizes[argument.name] if is_size else example_scalar(op, argument)
        return within_limit(op, argument.name, value, sizes)

    args = tuple(
        tensor(argument.name) if i in op.tensor_positions else scalar(argument)
        for i, argument in enumerate(sampled_arguments(op))
    )
    return Sample(args, seed=seed)


def each_layout(op: OpSpec) -> list[Sample]:
    """Returns calls with each dtype, and each layout with up to four loop dims."""
    dtypes = op.dtypes or (None,)
    found: list[Sample] = []
    for layout in LAYOUTS:
        if layout in OVERLAPPING and op.written:
            continue

        def laid_out(arg: TensorArg, layout: Layout = layout) -> TensorArg:
            return replace(arg, layout=layout if layout in layouts_of(arg.shape) else "contiguous")

        for rank in LOOP_DIMS if op.tensor_positions else (0,):
            dtype = dtypes[len(found) % len(dtypes)]
            found.append(shaped(op, (2, 3, 4, 5)[:rank], core=3, dtype=dtype, seed=len(found)))
            found[-1] = found[-1].with_tensors(laid_out)
    return found


def broadcast_over(op: OpSpec, sample: Sample) -> list[Sample]:
    """Returns the sample with one row in the last tensor that has rows, if another has some too."""
    growing = [i for k, i in enumerate(op.tensor_positions) if group_of(op, k).loops]
    if len(growing) < 2:
        return []
    args = list(sample.args)
    args[growing[-1]] = replace(args[growing[-1]], shape=(1, *args[growing[-1]].shape[1:]))
    return [replace(sample, args=tuple(args))]


def example_dtype(op: OpSpec, name: str, wanted: torch.dtype | None = None) -> torch.dtype:
    """Returns the dtype to give a tensor argument: the wanted one, or float32, where it takes that;
    where it has a list of its own without it, the first there.
    """
    allowed = op.allowed_dtypes(name)
    if wanted is not None and name not in op.dtypes_of:
        return wanted
    preferred = (wanted or torch.float32, torch.float32, *allowed)
    return next(dtype for dtype in preferred if dtype in allowed or not allowed)


def widest_floating(op: OpSpec) -> torch.dtype | None:
    """Returns the widest floating dtype, whose tolerance hides least."""
    floating = [dtype for dtype in op.dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: dtype.itemsize, default=None)


def widest_of_all(op: OpSpec) -> torch.dtype | None:
    """Returns the widest floating dtype that each tensor may have which may be floating."""
    if not op.dtypes:
        return torch.float64
    lists = [op.allowed_dtypes(name) for name in op.tensor_names]
    floating = [dtypes for dtypes in lists if any(d.is_floating_point for d in dtypes)]
    common = [d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
              if all(d in dtypes for dtypes in floating or lists)]  # fmt: skip
    return common[0] if common else None


def most_elements(op: OpSpec, loop: tuple[int, ...], core: Mapping[str, int]) -> int:
    """Returns the elements of the largest tensor, results included, of a call of these sizes."""
    assert op.signature is not None
    sizes = {**dict.fromkeys((*op.signature.names, *op.signature.int_names), 1), **core}
    groups = (*op.signature.inputs, *op.signature.outputs)
    most: int = max(math.prod(group.shape(loop, sizes)) for group in groups)
    return most


def example_scalar(op: OpSpec, argument: Any) -> Any:
    """Returns an ordinary value for an argument that is not a tensor: its default, or by type."""
    if is_device(argument) and (op.device_position is not None or not argument.has_default_value()):
        return DeviceArg()
    if argument.has_default_value():
        return default_of(argument)
    if argument.name in op.dtypes_of:
        return op.dtypes_of[argument.name][0]
    if argument.name in op.choices:
        return op.choices[argument.name][0]
    allowed = op.ranges.get(argument.name)
    if argument.name in op.float_ranges:
        within = op.float_ranges[argument.name]
        return min(max(0.5, within.ordinary), within.most)
    example: Any = {"float": 0.5, "int": 1, "bool": False}.get(str(argument.real_type))
    return allowed.least if allowed and example not in allowed else example


# --- an operator's own samples, with another size ---

#: The outermost dim of all tensors that have loop dims.
ROWS = "rows"


def resizable(op: OpSpec) -> list[str]:
    """Returns the dims of an operator whose sizes may be chosen: core dims, those that results
    alone have, by an int argument, and rows.
    """
    ints = () if op.signature is None else op.signature.int_names
    return [*dict.fromkeys((*op.drawn_dims, *ints)), *([ROWS] if op.tensor_positions else [])]


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
