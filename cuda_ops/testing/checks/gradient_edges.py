"""Class 7: gradients at zeros and between equal numbers, where finite differences tell nothing, and
far from both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cuda_ops.errors import KitError
from cuda_ops.testing.arguments import each, spread
from cuda_ops.testing.backward import backward, differentiable, laid_out
from cuda_ops.testing.case import Case, NotRunError, check, without_gradient
from cuda_ops.testing.compare import expected_results, outputs, widened, without_hidden
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import widest_of_all
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import is_floating

#: How many points around the numbers are looked at, and how far away they are. Where equal numbers
#: are put in order, each order of a few of them must come up.
_POINTS, _STEP = 64, 1e-6
#: By how much a gradient may be outside of those around it, relative to the largest.
_TOLERATED = 1e-4
#: The same, and how far away the points are, in roundings of the coarsest dtype of the call.
_ROUNDINGS = 16


def _edges(sample: Sample) -> Sample:
    """Returns the sample with small whole numbers, or with numbers of all sizes."""
    return sample.with_tensors(lambda arg: arg, "wide" if sample.seed % 3 == 0 else "whole")


def no_other_gradient(subject: Subject, device: str) -> str:
    """Returns why there is no gradient to compare with; empty if there is one."""
    if subject.reference is subject.op.overload:
        return "the reference is this very kernel"
    if subject.op.random:
        return "it draws random numbers"
    if subject.op.written:
        return "it writes an argument"
    if widest_of_all(subject.op) is None:
        return "no floating dtype that all tensors may have"
    return without_gradient(subject, device)


@check("gradient_edges", 7, "the gradient is wrong at zeros, equal or large numbers",
       Draw(12, range(1, 41), torch.float64, or_widest=True, floating=True, adapt=_edges),
       quick=True, excuse=no_other_gradient)  # fmt: skip
def gradient_edges(case: Case) -> None:
    """Compares the gradient with the reference's, which torch derives, for small whole numbers, of
    which many are 0 and many are equal, and for sizes from 0.01 to 1000. At a kink any number
    between the gradients around it will do, as long as those of equal numbers add up to what theirs
    do.
    """
    compare_gradients(case)


def compare_gradients(case: Case, count: int = _POINTS) -> None:
    """Compares the gradients of a sample, in float64 if possible, with those of the reference at
    points around it.

    Raises:
        AssertionError: one lies outside of them.
        NotRunError: there is none, or torch derives none of the reference.
        KitError: the reference raised.
    """
    leaves = case.leaves()
    found = case.call(*leaves)
    having = [i for i, out in enumerate(found) if out.requires_grad]
    ends = differentiable(found)
    if not ends or len(ends) != len(having):
        raise NotRunError("no floating outputs")
    incoming = [laid_out(out, "contiguous", i) for i, out in enumerate(ends)]
    ours = backward(ends, leaves, incoming)
    derived = _derived(case, having, len(found), [g.cpu() for g in incoming])
    dtypes = [value.dtype for value in spread([*leaves, *ends]) if is_floating(value)]
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) * _ROUNDINGS
    rounding *= case.subject.claims.tolerance
    step = max(_STEP, rounding)
    around = [derived(0.0), *(derived(step) for _ in range(count))]
    named = [
        (name, one.detach().cpu())
        for name, leaf in zip(case.subject.op.argument_names, leaves, strict=False)
        for one in spread([leaf])
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    compared, tolerated = [], 0.0
    for (name, leaf), got, expected in zip(named, ours, zip(*around, strict=True), strict=True):
        points = torch.stack(expected)
        least, most = points.amin(0), points.amax(0)
        # Where torch's own has none, nothing can be said.
        known = points.isfinite().all(0)
        largest = float(points[:, known].abs().max()) if known.any() else 0.0
        off = max(_TOLERATED, rounding) * (1 + largest)
        got = got.cpu()
        wrong = known & ~((got >= least - off) & (got <= most + off))
        if wrong.any():
            at = tuple(int(i) for i in wrong.nonzero()[0])
            raise AssertionError(
                f"the gradient of '{name}' at {list(at)} is {got[at]:.6g}, and the reference's "
                f"{_between(float(least[at]), float(most[at]))}"
            )
        tolerated = max(tolerated, off)
        compared.append(_Known(name, leaf, got.where(known, 0.0), points.where(known, 0.0)))
    _compare_sums(compared, tolerated)


class _Known(NamedTuple):
    """A tensor, its gradient, and the reference's around it; 0 where that has none."""

    name: str
    leaf: torch.Tensor
    ours: torch.Tensor
    around: torch.Tensor

    def summed(self, value: torch.Tensor, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both sums along a dim, or over all, where the tensor has this value."""
        here = self.leaf == value
        ours, around = self.ours.where(here, 0.0), self.around.where(here, 0.0)
        if dim is not None:
            return ours.sum(dim), around.sum(dim)
        return ours.sum(), around.reshape(len(around), -1).sum(1)


def _compare_sums(tensors: list[_Known], off: float) -> None:
    """Where equal numbers move together there may be no kink, as for those of which the largest is
    taken: then the gradients around have one sum, and ours has that too.
    """
    numbers, counts = torch.cat([one.leaf.flatten() for one in tensors]).unique(return_counts=True)
    for value in numbers[counts > 1]:
        for one in tensors:
            for dim in (None, *range(-one.leaf.dim(), 0)):
                _compare_sum(f"'{one.name}'", value, *one.summed(value, dim), off)
        ours, around = zip(*(one.summed(value, None) for one in tensors), strict=True)
        _compare_sum("the arguments", value, sum(ours), sum(around), off)


def _compare_sum(
    what: str, value: torch.Tensor, ours: torch.Tensor, around: torch.Tensor, off: float
) -> None:
    least, most = around.amin(0), around.amax(0)
    wrong = (most - least <= off) & ((ours < least - off) | (ours > most + off))
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"the gradients of {what} where they are {float(value):.6g} add up to {ours[at]:.6g}, "
            f"and the reference's to {most[at]:.6g} wherever these numbers move together"
        )


def _between(least: float, most: float) -> str:
    alike = f"{least:.6g}" == f"{most:.6g}"
    return f"{most:.6g}" if alike else f"between {least:.6g} and {most:.6g}"


def _derived(
    case: Case, having: list[int], count: int, incoming: list[torch.Tensor]
) -> Callable[[float], list[torch.Tensor]]:
    """Returns a function that moves each number at random, by as much, and returns the gradients
    that torch derives of the reference.
    """
    subject = case.subject
    assert subject.reference is not None
    asked = [getattr(value, "requires_grad", False) for value in spread(case.leaves())]
    values = widened(subject.op, subject.reference, case.sample.make("cpu"))
    generator = torch.Generator().manual_seed(case.sample.seed)

    def gradients(step: float) -> list[torch.Tensor]:
        flags = iter(asked)

        def moved(value: Any) -> Any:
            if not next(flags):
                return value
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            return (value.contiguous() + step * noise).requires_grad_()

        leaves = tuple(each(moved, value) for value in values)
        results = outputs(expected_results(subject, leaves))
        _, shown = without_hidden(subject.op, [None] * count, results)
        ends = [shown[i] for i in having]
        if not all(end.requires_grad for end in ends):
            raise NotRunError("torch derives no gradient of the reference")
        try:
            return backward(
                ends, leaves, [g.to(e.dtype) for g, e in zip(incoming, ends, strict=True)]
            )
        except RuntimeError as error:
            raise KitError(f"the gradient that torch derives of the reference: {error}") from error

    return gradients
