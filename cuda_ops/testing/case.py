"""What a check is: one idea, as a function of one case, and what a table shows of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cuda_ops.testing.arguments import in_order
from cuda_ops.testing.compare import is_floating, outputs, reduction_length, tensors
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import Subject


class NotRunError(Exception):
    """Why a check does not apply to an operator, a device or a sample."""


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

    def call(self, *args: Any) -> tuple[Any, ...]:
        """The operator's outputs, always as a tuple."""
        return outputs(self.operator(*args))

    @property
    def slack(self) -> float:
        """Factor on the tolerance: longer sums, and what the operator claims."""
        length = reduction_length(self.subject.op, self.sample)
        return self.subject.claims.tolerance * math.sqrt(length)

    def arguments(self) -> tuple[Any, ...]:
        return self.sample.make(self.device)

    def leaves(self, *, even_refused: bool = False) -> tuple[Any, ...]:
        """The arguments, floating ones as contiguous leaves that ask for a gradient if they have
        one, or ``even_refused``.
        """
        having = None if even_refused else self.subject.differentiable
        return tuple(
            value.clone(memory_format=torch.contiguous_format).requires_grad_(
                having is None or i in having
            )
            if is_floating(value)
            else value
            for i, value in enumerate(self.arguments())
        )


def wanting(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that ask for a gradient."""
    return [tensor for tensor in tensors(args) if tensor.requires_grad]


@dataclass(frozen=True)
class Check:
    """One check. ``body`` raises AssertionError, or anything that the operator raised."""

    name: str
    #: Its row in the list of fifteen classes of docs/testing.md; ``None`` for those beside it.
    number: int | None
    #: The mistake that it finds.
    title: str
    body: Callable[[Case], None]
    draw: Draw
    #: Where it can show anything.
    devices: tuple[str, ...] = ("cpu", "cuda")
    #: Part of ``compile_dev.py --check``.
    quick: bool = False
    #: Why it says nothing about an operator on a device; empty where it does.
    excuse: Callable[[Subject, str], str] = lambda subject, device: ""

    @property
    def label(self) -> str:
        """How a failure names it: ``class 4, the forward assumes contiguous inputs``."""
        return f"class {self.number}, {self.title}" if self.number else self.title


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
    """Make a check of the function below it."""
    return lambda body: Check(name, number, title, body, draw, devices, quick, excuse)


# --- excuses ------------------------------------------------------------------------


def without_gradient(subject: Subject, device: str) -> str:
    """For checks of a gradient."""
    if subject.gradient == "declared":
        return ""
    backward = f"{subject.op.name}_backward"
    return (
        f"no gradient declared: no {backward}"
        if subject.gradient == "refused"
        else ("the operator does not claim to be differentiable")
    )


def without_float64(subject: Subject, device: str) -> str:
    """For checks of a gradient by finite differences."""
    if subject.op.dtypes and torch.float64 not in subject.op.dtypes:
        return "finite differences need float64, which the operator does not take"
    return without_gradient(subject, device)
