"""A check: one idea, as a function of one case, and what a table shows of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cuda_ops.testing.arguments import each, in_order, spread
from cuda_ops.testing.compare import least_epsilon, reduction_length, results
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import widest_of_all
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import is_floating, is_inexact, same, tensors


class NotRunError(Exception):
    """A check does not apply to an operator, a device or a sample; the text says why."""


class OtherMistakeError(AssertionError):
    """A check found a mistake of another kind than its own, which ``label`` names."""

    def __init__(self, text: str, label: str) -> None:
        super().__init__(text)
        self.label = label


@dataclass(frozen=True)
class Case:
    """One operator, on one device, with one sample."""

    subject: Subject
    device: str
    sample: Sample

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def operator(self) -> Callable[..., Any]:
        """The operator as a function of arguments in the order of its schema."""
        return in_order(self.subject.op, self.subject.op.overload)

    def call(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Calls the operator; returns its results, those in changed arguments included."""
        return self.results(self.operator, args)

    def results(
        self, function: Callable[..., Any], args: Sequence[Any]
    ) -> tuple[torch.Tensor, ...]:
        """Returns what :meth:`call` does, for another form of the operator."""
        return results(self.subject.op, function, args)

    def same(self, actual: Sequence[Any], expected: Sequence[Any], what: str) -> None:
        """Compares two runs of the operator, perhaps with sums in another order. What it claims
        widens the tolerance, and so do long sums.

        Raises:
            AssertionError: they differ by more; the text starts with ``what``.
        """
        claims = self.subject.claims
        length = reduction_length(self.subject.op, self.sample, claims.sums_over)
        factor = claims.tolerance * math.sqrt(length)
        least = least_epsilon(self.subject, self.sample)
        same(actual, expected, what, factor=factor, least=least)

    def arguments(self) -> tuple[Any, ...]:
        return self.sample.make(self.device)

    def leaves(self, *, even_refused: bool = False, even_complex: bool = False) -> tuple[Any, ...]:
        """Returns the arguments, floating ones as contiguous leaves, with ``even_complex`` complex
        ones too. Those with a declared gradient ask for one; with ``even_refused`` all do.
        """
        has_gradient = is_inexact if even_complex else is_floating
        having = None if even_refused else self.subject.differentiable
        changed = self.subject.op.written  # torch changes no leaf that asks for a gradient
        if changed and self.subject.gradient == "none":
            having = ()

        def leaf(i: int, value: Any) -> Any:
            if not has_gradient(value):
                return value
            return value.clone(memory_format=torch.contiguous_format).requires_grad_(
                (having is None or i in having) and i not in changed
            )

        return tuple(each(partial(leaf, i), value) for i, value in enumerate(self.arguments()))


def called(case: Case, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
    """Returns the outputs; ``None`` if the operator refuses."""
    try:
        return case.call(*args)
    except (RuntimeError, ValueError) as refusal:
        if "CUDA error" in str(refusal):
            raise
        return None


def defined(case: Case, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments, changed in place where a result of theirs is NaN: made positive, for a
    logarithm, and then less than 1, for an arcsine. torch takes NaN for different from itself, and
    no difference tells of a gradient.

    Raises:
        NotRunError: there is NaN still.
    """

    def has_nan() -> bool:
        return any(is_inexact(found) and found.isnan().any() for found in case.call(*args))

    for change in (torch.abs, lambda value: value / (1 + value)):
        if not has_nan():
            return args
        with torch.no_grad():
            for value in spread(args):
                if is_floating(value) and value.dtype.itemsize > 1:
                    value.copy_(change(value))
    if has_nan():
        raise NotRunError("results are NaN, also of numbers between 0 and 1")
    return args


def wanting(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Returns the tensors that ask for a gradient."""
    return [tensor for tensor in tensors(args) if tensor.requires_grad]


def sums(found: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the sum of each output that has a gradient, over both parts of complex numbers."""
    real = [torch.view_as_real(out) if out.is_complex() else out for out in found]
    wide = [out.float() if out.itemsize == 1 else out for out in real]  # torch adds up no float8
    return [out.sum() for out in wide if out.requires_grad]


@dataclass(frozen=True)
class Check:
    """One check. ``body`` raises AssertionError, or anything that the operator raised."""

    name: str
    #: Its class among the fifteen of docs/testing.md; ``None`` for a check of no class.
    number: int | None
    #: The mistake that it finds, as a failure names it.
    title: str
    body: Callable[[Case], None]
    draw: Draw
    #: The devices on which it can find anything.
    devices: tuple[str, ...] = ("cpu", "cuda")
    #: Part of ``compile_dev.py --check``.
    quick: bool = False
    #: Returns why it cannot run for an operator on a device; empty if it can.
    excuse: Callable[[Subject, str], str] = lambda subject, device: ""


def check(
    name: str,
    number: int | None,
    title: str,
    draw: Draw,
    *,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    quick: bool = False,
    excuse: Callable[[Subject, str], str] = lambda subject, device: "",
) -> Callable[[Callable[[Case], None]], Check]:
    """Makes a check of the decorated function."""
    return lambda body: Check(name, number, title, body, draw, devices, quick, excuse)


# --- excuses ------------------------------------------------------------------------

#: Why what is done to tensors cannot be checked.
NO_TENSOR = "no argument is a tensor"


def nondeterministic(subject: Subject, device: str) -> str:
    """Returns why bits cannot be compared; empty if they can."""
    return "" if subject.claims.deterministic else f"no such claim: {subject.claims.reason}"


def without_gradient(subject: Subject, device: str) -> str:
    """Returns why a gradient cannot be checked; empty if it can."""
    if subject.gradient == "declared":
        return ""
    if subject.why_no_gradient:
        return f"no gradient: {subject.why_no_gradient}"
    return "the operator does not claim to be differentiable"


def without_float64(subject: Subject, device: str) -> str:
    """Returns why finite differences cannot check a gradient; empty if they can."""
    if widest_of_all(subject.op) != torch.float64:
        return "finite differences need float64, which the operator does not take"
    return without_gradient(subject, device)
