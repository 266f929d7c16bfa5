"""Class 7: infinities, NaN and other edge values; and results that are plainly wrong."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from cuda_ops.derive.layout import is_elementwise
from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.compare import deviation, reduction_length
from cuda_ops.testing.draw import Draw, plain
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.tolerance import EPSILONS
from cuda_ops.testing.values import Values

#: How many times the tolerance is allowed where all numbers are far from 0: what is left of their
#: differences has lost some digits, and the mean of squares has lost nearly all.
_TOLERATED = 4


def _edges(sample: Sample) -> Sample:
    """Returns the sample with anything but ordinary values, in contiguous tensors."""
    values = "wide" if sample.values == "normal" else sample.values
    return replace(plain(sample), values=values)


def _agrees(case: Case, tolerated: float = 1) -> None:
    worst = deviation(case.subject, case.sample, case.call(*case.arguments()))
    assert worst <= tolerated, worst.text


@check("reference", None, "the result is not the reference's", Draw(), quick=True)
def reference(case: Case) -> None:
    """Compares ordinary values, contiguous, with the float64 reference by the dtype's tolerance."""
    _agrees(case)


#: Sizes of core dims to choose from, the first that makes no more elements than these.
_CORES, _MOST = (64, 32, 16, 8), 1 << 16


def _each_at_an_end(op: OpSpec) -> list[Sample]:
    """Returns calls in which one tensor in turn holds some infinities of one sign, nothing else,
    numbers next to the smallest, next to the largest, zeros, halves of rows that cancel, a mean far
    from zero, or small whole numbers, of which some are equal.

    Sums of the largest numbers depend on their order, so those are for elementwise operators alone.
    """
    kinds: tuple[Values, ...] = ("infinite", "negative_infinite", "smallest", "zeros",
                                 "all_infinite", "all_negative_infinite", "whole")  # fmt: skip
    kinds += ("largest",) if is_elementwise(op) else ("cancelling", "far_mean")
    sizes = (shaped(op, (3, 7), core=core) for core in _CORES)
    ordinary = next((sample for sample in sizes if sample.numel <= _MOST), shaped(op, (3, 7)))

    def at_an_end(i: int, values: Values) -> Sample:
        args = list(ordinary.args)
        args[i] = replace(args[i], values=values)
        return replace(ordinary, args=tuple(args), seed=i)

    # A random key has no numbers to be at an end of.
    positions = [i for i in op.tensor_positions if op.argument_names[i] != op.random]
    return [at_an_end(i, values) for i in positions for values in kinds]


@check("numerics", 7, "wrong for edge values, such as NaN, infinities or zeros",
       Draw(adapt=_edges, beside=_each_at_an_end), quick=True)  # fmt: skip
def numerics(case: Case) -> None:
    """Compares signed zeros, infinities, NaN, denormals, huge, equal values, and sizes from 0.01 to
    1000, with the reference; then each argument alone at the ends of its dtype, and with ties.
    """
    far = any(arg.values == "far_mean" for arg in case.sample.tensors)
    _agrees(case, _TOLERATED if far else 1)


_HALVES = (torch.float16, torch.bfloat16)
#: Epsilons that one rounding may be off by, and a quarter more for what float32 adds.
_ONE_ROUNDING = 0.5 * 1.25
#: Rows, and the terms of their sums: what one block adds up, and what kernels cut into parts. The
#: first are used that make no more elements than ``_MOST_TERMS``.
_SHORT_SUMS = ((64, 300), (64, 100), (64, 40), (8, 300), (8, 40))
_LONG_SUMS = ((8, 5000), (2, 5000), (1, 5000), (1, 2500))
_MOST_TERMS = 1 << 18
#: Sizes of other dims: rows of whole vectors, and rows that begin anywhere.
_WHOLE, _ODD = 8, 5
_SUMS = ((_WHOLE, _SHORT_SUMS), (_ODD, _SHORT_SUMS), (_WHOLE, _LONG_SUMS))


def _sums_in_half(op: OpSpec) -> list[Sample]:
    """Returns calls with sums of many 16-bit numbers, if there is a dim that no result has."""
    assert op.signature is not None
    kept = {dim for group in op.signature.outputs for dim in group.core}
    if not op.signature.outputs or all(dim in kept for dim in op.signature.names):
        return []
    found = []
    for dtype in _HALVES:
        for other, sizes in _SUMS if dtype in op.dtypes else ():
            calls = (_summed(op, rows, terms, kept, other, dtype) for rows, terms in sizes)
            found += [one for one in calls if one.numel <= _MOST_TERMS][:1]
    return list(dict.fromkeys(found))


def _summed(
    op: OpSpec, rows: int, terms: int, kept: Collection[str], other: int, dtype: torch.dtype
) -> Sample:
    core = {dim: other if dim in kept else terms for dim in op.drawn_dims}
    return shaped(op, (rows,), core=core, dtype=dtype)


@check(
    "rounding",
    7,
    "sums of 16-bit numbers are rounded more than once",
    Draw(6, listed=_sums_in_half),
)
def rounding(case: Case) -> None:
    """Checks that sums of 16-bit numbers are rounded once, at their end: what is added up in 16
    bits, or in parts that are kept in 16 bits, has an error that the tolerance hides.
    """
    claims, dtypes = case.subject.claims, {arg.dtype for arg in case.sample.tensors}
    if claims.rounds_between or claims.tolerance > 1:
        raise NotRunError("it claims more than one rounding")
    if reduction_length(case.subject.op, case.sample) < 2 or not dtypes & set(_HALVES):
        raise NotRunError("no sums of 16-bit numbers")
    found = case.call(*case.arguments())
    factor = _ONE_ROUNDING / EPSILONS[torch.float16]
    worst = deviation(case.subject, case.sample, found, factor=factor, rounded=False)
    assert worst <= 1, (
        f"{worst.text}, which is that of one rounding: add up 16-bit numbers in float32, or claim "
        "rounds_between"
    )
