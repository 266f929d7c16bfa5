"""Class 7: infinities, NaN and other edge values; and results that are plainly wrong."""

from __future__ import annotations

from dataclasses import replace

from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw, plain
from cuda_ops.testing.samples import Sample


def _edges(sample: Sample) -> Sample:
    """Returns the sample with anything but ordinary values, in contiguous tensors."""
    values = "special" if sample.values == "normal" else sample.values
    return replace(plain(sample), values=values)


def _agrees(case: Case) -> None:
    worst = deviation(case.subject, case.sample, case.call(*case.arguments()))
    assert worst <= 1, worst.text


@check("reference", None, "the result is not the reference's", Draw(), quick=True)
def reference(case: Case) -> None:
    """Compares ordinary values, contiguous, with the float64 reference by the dtype's tolerance."""
    _agrees(case)


@check("numerics", 7, "NaN, infinity or edge numerics", Draw(adapt=_edges), quick=True)
def numerics(case: Case) -> None:
    """Compares signed zeros, infinities, NaN, denormals, huge, equal values with the reference."""
    _agrees(case)
