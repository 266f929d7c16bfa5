"""Class 7: infinities, NaN and other edges; and a result that is plainly wrong."""

from __future__ import annotations

from dataclasses import replace

from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw, plain
from cuda_ops.testing.samples import Sample


def _edges(sample: Sample) -> Sample:
    """Anything but ordinary values, in contiguous tensors."""
    values = "special" if sample.values == "normal" else sample.values
    return replace(plain(sample), values=values)


def _agrees(case: Case) -> None:
    worst = deviation(case.subject, case.sample, case.call(*case.arguments()))
    assert worst <= 1, worst.text


@check("reference", None, "the result is not the reference's", Draw(), quick=True)
def reference(case: Case) -> None:
    """Ordinary values, contiguous: the float64 reference within the tolerance of the dtype."""
    _agrees(case)


@check("numerics", 7, "NaN, infinity or edge numerics", Draw(adapt=_edges), quick=True)
def numerics(case: Case) -> None:
    """Signed zeros, infinities, NaN, denormals, huge and equal values: as the reference has it."""
    _agrees(case)
