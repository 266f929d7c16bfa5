"""Class 7: infinities, NaN and other edge values; and results that are plainly wrong."""

from __future__ import annotations

from dataclasses import replace

from cuda_ops.derive.layout import is_elementwise
from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw, plain
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.values import Values


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


#: Sizes of core dims to choose from, the first that makes no more elements than these.
_CORES, _MOST = (64, 32, 16, 8), 1 << 16


def _each_at_an_end(op: OpSpec) -> list[Sample]:
    """Returns calls in which one tensor in turn holds infinities of one sign, numbers next to the
    smallest, next to the largest, or halves of rows that cancel.

    Sums of the largest numbers depend on their order, so those are for elementwise operators alone.
    """
    kinds: tuple[Values, ...] = ("infinite", "negative_infinite", "smallest")
    kinds += ("largest",) if is_elementwise(op) else ("cancelling",)
    sizes = (shaped(op, (3, 7), core=core) for core in _CORES)
    ordinary = next((sample for sample in sizes if sample.numel <= _MOST), shaped(op, (3, 7)))

    def at_an_end(i: int, values: Values) -> Sample:
        args = list(ordinary.args)
        args[i] = replace(args[i], values=values)
        return replace(ordinary, args=tuple(args), seed=i)

    # A random key has no numbers to be at an end of.
    positions = [i for i in op.tensor_positions if op.argument_names[i] != op.random]
    return [at_an_end(i, values) for i in positions for values in kinds]


@check("numerics", 7, "NaN, infinity or edge numerics",
       Draw(adapt=_edges, beside=_each_at_an_end), quick=True)  # fmt: skip
def numerics(case: Case) -> None:
    """Compares signed zeros, infinities, NaN, denormals, huge, equal values with the reference;
    then each argument alone at the ends of its dtype.
    """
    _agrees(case)
