"""Benchmark cases for operators whose plugin gives none.

They answer ``cuda_ops_benchmarks`` last, and are imported when it is first asked.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from cuda_ops.benchmarking import rotation
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec
from cuda_ops.testing.arguments import sampled_arguments, split
from cuda_ops.testing.sizes import example_dtype, example_scalar

#: Sizes for operators without core dims: the number of elements, and why.
_LOOP_NUMEL = {
    "1K": (2**10, "the launch is the whole cost"),
    "32K": (2**15, "a grid that does not fill a large GPU"),
    "1M": (2**20, "one short kernel, inside any cache"),
    "16M": (2**24, "beyond the cache, launch still visible"),
    "256M": (2**28, "memory bandwidth alone"),
    "1G": (2**30, "half of what 32 bits count"),
}
#: The most elements without a tensor argument, where the reference computes all of them.
_MOST_OF_NUMBERS = 2**24
#: Sizes with one core dim: rows and their length, and why.
_ROW_SIZES = {
    (1, 1024): "one row, as when one token is decoded",
    (4096, 1024): "many short rows",
    (4096, 16384): "memory bandwidth alone",
    (16, 2**20): "few long rows",
}
#: Sizes with several core dims, or with one and no loop dims: all core dims are this long.
_CORE_SIZES = {256: "small", 1024: "medium"}
#: The dtypes to time, as far as the operator takes them.
_TIMED_DTYPES = (torch.float32, torch.bfloat16)
#: The other half type differs in arithmetic alone, so it is timed at one size.
_ONE_MORE = (torch.float16, "16M")


@hookimpl(trylast=True)
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    """Returns growing sizes in the dtypes that are used most; bytes are sizes in + sizes out."""
    signature = op.signature
    if signature is None:
        return None
    dims, from_numbers = op.drawn_dims, op.device_position is not None

    def within(dim: str, size: int) -> int:
        allowed = op.ranges.get(dim)
        return min(max(size, allowed.least), allowed.most) if allowed else size

    points: list[tuple[str, str, tuple[int, ...], dict[str, int]]]
    if len(dims) == 1 and any(group.loops for group in signature.inputs):
        sizes = {(rows, within(dims[0], n)): why for (rows, n), why in _ROW_SIZES.items()}
        points = [(f"{rows}x{n}", why, (rows,), {dims[0]: n}) for (rows, n), why in sizes.items()]
    elif len(dims) == 1 and from_numbers:
        points = [
            (label, why, (), {dims[0]: within(dims[0], numel)})
            for label, (numel, why) in _LOOP_NUMEL.items()
            if numel <= _MOST_OF_NUMBERS
        ]
    elif dims:
        names = "=".join(dims)
        points = [
            (f"{names}={n}", why, (), {dim: within(dim, n) for dim in dims})
            for n, why in _CORE_SIZES.items()
        ]
    else:
        points = [(label, why, (numel,), {}) for label, (numel, why) in _LOOP_NUMEL.items()]
    known = op.dtypes
    for name in op.dtype_names if from_numbers else ():
        known = known or op.dtypes_of.get(name, ())
    timed = [dtype for dtype in _TIMED_DTYPES if dtype in known]
    cases = [
        _case(op, *point, dtype)
        for dtype in timed or known[:1] or _TIMED_DTYPES[:1]
        for point in points
    ]
    extra, size = _ONE_MORE
    return cases + [_case(op, *p, extra) for p in points if p[0] == size and extra in known]


def _case(
    op: OpSpec,
    label: str,
    reason: str,
    loop: tuple[int, ...],
    sizes: dict[str, int],
    dtype: torch.dtype,
) -> BenchmarkCase:
    assert op.signature is not None
    groups, moved = iter(op.signature.inputs), 0
    values: list[Any] = []
    dtypes: dict[str, torch.dtype] = {}
    for i, argument in enumerate(sampled_arguments(op)):
        if i in op.tensor_positions:
            shape = next(groups).shape(loop, sizes)
            own = example_dtype(op, argument.name, dtype)
            dtypes[argument.name] = own
            below = sizes.get(op.belows.get(argument.name, ""))
            values.append(rotation.Random(shape, own, below))
            moved += math.prod(shape) * own.itemsize
        elif op.device_position is not None and argument.name in sizes:
            values.append(sizes[argument.name])
        elif argument.name in op.signature.int_names:  # results as long as what is read
            within = op.ranges[argument.name]
            longest = max((*sizes.values(), *loop))
            values.append(min(max(longest, within.least), within.most))
        else:
            values.append(example_scalar(op, argument))
            if op.device_position is not None and dtype in op.dtypes_of.get(argument.name, ()):
                values[-1] = dtype
            if argument.name in op.dtype_names and values[-1] is not None:
                dtypes[argument.name] = values[-1]
    named = {n: values[op.argument_names.index(n)] for n in op.signature.int_names}
    for group, own in zip(op.signature.outputs, op.output_dtypes(dtypes), strict=True):
        moved += math.prod(group.shape(loop, sizes | named)) * own.itemsize
    args, keywords = split(op, tuple(values))
    return BenchmarkCase(
        f"{label} {str(dtype).removeprefix('torch.')}",
        rotation.maker(args),
        bytes=moved,
        keywords=keywords,
        reason=reason,
        dtype=dtype,
    )
