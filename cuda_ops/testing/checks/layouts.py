"""Class 4: a forward that assumes contiguous inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.allocations import reuses_memory
from cuda_ops.testing.case import Case, NotRunError, OtherMistakeError, check
from cuda_ops.testing.checks.temporaries import temporaries
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import LAYOUTS, OVERLAPPING, Layout, Sample, TensorArg, layouts_of
from cuda_ops.testing.sizes import shaped, within_ranges


def _strided(sample: Sample) -> Sample:
    """Returns the sample with ordinary values and strided tensors. An offset alone is for
    ``alignment`` to check; a sample without other layouts gets strides for every tensor.
    """
    dense = {arg.layout for arg in sample.tensors} <= {"contiguous", "offset"}

    def adapted(arg: TensorArg) -> TensorArg:
        if not dense and arg.layout != "offset":
            return arg
        return replace(arg, layout="transposed" if len(arg.shape) > 1 else "stepped")

    return sample.with_tensors(adapted, "normal")


#: The length of rows that a block of threads takes several steps for, some of them in vectors; one
#: with a thread for each element can do it still.
_LONG = 1000


def _odd_and_long_rows(op: OpSpec) -> list[Sample]:
    """Returns calls in which the first row is aligned and, an odd distance on, the next one not;
    and calls of longer rows in each layout, as far as the operator takes such rows.
    """
    found = [shaped(op, loop, core=loop[-1], layout="padded") for loop in ((3, 4), (2, 7))]
    core = dict.fromkeys(op.drawn_dims, 3)
    with_long = [core | {dim: _LONG} for dim in reversed(core)]
    fitting = [sizes for sizes in with_long if within_ranges(op, sizes)]
    long = shaped(op, (2, 3) if fitting else (2, 3, _LONG), core=fitting[0] if fitting else core)
    for layout in LAYOUTS:
        if layout in ("contiguous", "offset") or (layout in OVERLAPPING and op.written):
            continue

        def laid_out(arg: TensorArg, layout: Layout = layout) -> TensorArg:
            return replace(arg, layout=layout if layout in layouts_of(arg.shape) else "stepped")

        found.append(long.with_tensors(laid_out))
    return found


@check("layouts", 4, "the forward assumes contiguous inputs", quick=True,
       draw=Draw(adapt=_strided, beside=_odd_and_long_rows))  # fmt: skip
def layouts(case: Case) -> None:
    """Checks that equal values in another layout give an equal result, or a clear error: one
    argument strided alone, two of them, all of them.
    """
    args = case.arguments()
    dense = [v.contiguous().clone() if isinstance(v, torch.Tensor) else v for v in args]
    expected = case.call(*dense)
    refused: Exception | None = None
    for some in _subsets([i for i, v in enumerate(args) if isinstance(v, torch.Tensor)]):
        mixed = [v if i in some else dense[i] for i, v in enumerate(args)]
        try:
            actual = case.call(*mixed)
        except (RuntimeError, ValueError) as refusal:
            if "CUDA error" in str(refusal):
                raise
            refused = refusal
            continue
        layouts = ", ".join(
            arg.layout if i in some else "contiguous"
            for i, arg in enumerate(case.sample.args)
            if isinstance(arg, TensorArg)
        )
        try:
            case.same(actual, expected, f"not the result of contiguous inputs ({layouts})")
        except AssertionError as failure:
            if case.on_cuda and _frees_too_early(case, dense, mixed):
                text = f"{failure}; what it allocates next is the memory of a copy that it freed"
                raise OtherMistakeError(text, temporaries.title) from failure
            raise
    if refused is not None:
        raise NotRunError(f"the operator refuses some layouts: {refused}") from refused


def _frees_too_early(case: Case, dense: Sequence[Any], strided: Sequence[Any]) -> bool:
    """Tells whether a call of strided arguments alone allocates what it has freed: a copy, perhaps
    before the launch that reads it.
    """
    calls = [partial(case.operator, *args) for args in (strided, dense)]
    of_strided, of_dense = (reuses_memory(case.device, call) for call in calls)
    return of_strided and not of_dense


def _subsets(positions: list[int]) -> list[tuple[int, ...]]:
    """Returns each position, each pair, and all: a path for one strided argument is not one for
    two.
    """
    sizes = dict.fromkeys((1, 2, len(positions)))
    return [some for size in sizes for some in combinations(positions, size)]
