"""Gradients: declared or refused, never silently missing; and right, by finite differences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

from cuda_ops.derive.no_gradient import LOST
from cuda_ops.spec import OpSpec
from cuda_ops.testing.arguments import sampled_arguments
from cuda_ops.testing.case import (
    Case,
    NotRunError,
    check,
    defined,
    sums,
    wanting,
    without_float64,
    without_gradient,
)
from cuda_ops.testing.compare import outputs
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import broadcast_over, shaped
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import is_floating, is_inexact


def _nothing_claimed(subject: Subject, device: str) -> str:
    return without_gradient(subject, device) if subject.gradient == "none" else ""


@check("gradient_declared", None, "undeclared autograd: a gradient is silently lost",
       Draw(2, range(1, 513), floating=True), quick=True, excuse=_nothing_claimed)  # fmt: skip
def gradient_declared(case: Case) -> None:
    """Checks that each floating input gets a gradient, or that asking for one is an error, and
    that each floating output takes part.
    """
    leaves = case.leaves(even_refused=True)
    constant = [name in case.subject.op.constants for name in case.subject.op.output_names]
    taking = [
        output
        for output, is_constant in zip_longest(case.call(*leaves), constant)
        if is_floating(output) and not is_constant
    ]
    if not wanting(leaves) or not taking:
        raise NotRunError("no floating inputs and outputs")
    silent = [k for k, output in enumerate(taking) if not output.requires_grad]
    assert not silent, f"output {silent[0]} requires no gradient, but an input does"
    ends = sums(taking)
    if case.subject.gradient == "refused":
        try:
            torch.autograd.grad(ends, wanting(leaves), allow_unused=True)
        except RuntimeError:
            return
        raise AssertionError("no gradient is declared, and asking for one is not refused")
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            name = case.subject.op.argument_names[i]
            try:
                (found,) = torch.autograd.grad(ends, [leaf], retain_graph=True, allow_unused=True)
            except RuntimeError as refusal:
                if LOST in str(refusal):
                    raise AssertionError(str(refusal)) from None
                continue
            assert found is not None, f"'{name}' gets no gradient, and there is no error"


def _rows(op: OpSpec, dtype: torch.dtype) -> list[Sample]:
    """Returns calls with several rows, since a gradient may be their sum, with each optional tensor
    left out, and with each other bool and word. Drawn samples of so few elements mostly have one
    row.
    """
    found = [shaped(op, (2, 3), core=2, dtype=dtype)]
    if op.signature is not None and (ints := op.signature.int_names):  # sizes of results alone
        core = {dim: 2 + i for i, dim in enumerate((*op.drawn_dims, *ints))}
        found.append(shaped(op, (2, 3), core=core, dtype=dtype))
    changed = [
        replace(whole, args=(*whole.args[:i], other, *whole.args[i + 1 :]))
        for whole in found
        for i, argument in enumerate(sampled_arguments(op))
        for other in _others(op, argument, whole.args[i])
    ]
    return [*found, *broadcast_over(op, found[0]), *changed]


def _others(op: OpSpec, argument: Any, value: Any) -> list[Any]:
    """Returns what else an argument may be: no tensor, the other bool, another word."""
    if str(argument.type) == "Optional[Tensor]":
        return [None]
    if isinstance(value, bool):
        return [not value]
    return [word for word in op.choices.get(argument.name, ()) if word != value]


#: Returns the derivatives of one result, which a number tells, with regard to one of the leaves.
Jacobian = Callable[[Case, tuple[Any, ...], int, torch.Tensor], torch.Tensor]
#: Other errors of gradcheck name an output and an input too, but not for a wrong number.
_MISMATCH = (
    r"^(?:While considering .* only, )?Jacobian .*\bmismatch "
    r"for output (\d+) with respect to input (\d+)$"
)


def rows_of_each(op: OpSpec) -> list[Sample]:
    """Returns rows of complex numbers too, where the operator takes them, and real ones if so."""
    wide = [d for d in (torch.float64, torch.complex128) if d in op.dtypes] or [torch.float64]
    return [sample for dtype in wide for sample in _rows(op, dtype)]


def without_wide(subject: Subject, device: str) -> str:
    if torch.complex128 in subject.op.dtypes:
        return without_gradient(subject, device)
    return without_float64(subject, device)


@check("gradcheck", None, "the gradient is wrong",
       Draw(3, range(1, 41), torch.float64, floating=True, beside=rows_of_each, choices=True),
       quick=True, excuse=without_wide)  # fmt: skip
def gradcheck(case: Case) -> None:
    """Compares the gradient with finite differences, in float64 and, where the operator takes it,
    in complex128.
    """
    leaves = case.leaves(even_complex=True)
    if not wanting(leaves):
        raise NotRunError("no argument that asks for a gradient")
    compare_with_differences(case, defined(case, leaves), _by_rows)


def compare_with_differences(
    case: Case, leaves: tuple[Any, ...], jacobian: Jacobian, **options: bool
) -> None:
    """Compares derivatives with finite differences by gradcheck, which takes the ``options``.

    ``jacobian`` finds the number that a message shows.

    Raises:
        AssertionError: they differ; the text has the number that is furthest off.
    """
    loose = 0.0 if case.subject.claims.deterministic else 1e-4

    def inexact(*args: Any) -> tuple[torch.Tensor, ...]:  # torch takes no differences of bools
        found = tuple(filter(is_inexact, outputs(case.operator(*args))))
        if any(one.requires_grad and one.dtype.to_real() != torch.float64 for one in found):
            raise NotRunError("a result is not float64, as finite differences need")
        return found

    try:
        torch.autograd.gradcheck(inexact, leaves, nondet_tol=loose, **options)
    except GradcheckError as error:
        # Instead of both Jacobians, which fill screens, the number that is furthest off.
        text = str(error).partition("\nnumerical:")[0].rstrip(", ")
        if mismatch := re.search(_MISMATCH, text):
            output, input_ = map(int, mismatch.groups())
            text = _furthest_off(case, leaves, output, input_, jacobian)
        raise AssertionError(text) from None


def _by_rows(case: Case, leaves: tuple[Any, ...], which: int, x: torch.Tensor) -> torch.Tensor:
    rows = [
        torch.autograd.grad(number, x, retain_graph=True, allow_unused=True, materialize_grads=True)
        for number in case.call(*leaves)[which].flatten()
    ]
    return torch.stack([row.flatten() for (row,) in rows])


def _furthest_off(
    case: Case, leaves: tuple[Any, ...], output: int, input_: int, jacobian: Jacobian
) -> str:
    """Describes the entry of a Jacobian that is furthest from its finite difference, by gradcheck's
    tolerance. ``output`` and ``input_`` count differentiable tensors alone, as gradcheck does.
    """
    op, x = case.subject.op, wanting(leaves)[input_]
    results = case.call(*leaves)
    which = [i for i, result in enumerate(results) if result.requires_grad][output]
    name = next(n for n, leaf in zip(op.argument_names, leaves, strict=False) if leaf is x)
    if results[which].is_complex():
        return f"'{name}': wrong for complex numbers"
    found = jacobian(case, leaves, which, x)
    expected, step = torch.zeros_like(found), 1e-6
    with torch.no_grad():
        for j in range(x.numel()):
            ends = []
            for offset in (step, -2 * step):
                x.view(-1)[j] += offset
                ends.append(case.call(*leaves)[which].flatten())
            x.view(-1)[j] += step
            expected[:, j] = (ends[0] - ends[1]) / (2 * step)
    off = (found - expected).abs() / (1e-5 + 1e-3 * expected.abs())
    off = off.nan_to_num(math.inf).where(found != expected, 0.0)  # infinities may be equal
    i, j = divmod(int(off.argmax()), x.numel())
    at, by = (_index(k, shape) for k, shape in ((i, results[which].shape), (j, x.shape)))
    entry = f"d {op.output_names[which]}{at} / d {name}{by}"
    return f"'{name}': got {entry} = {found[i, j]:.6g}, expected {expected[i, j]:.6g}"


def _index(k: int, shape: torch.Size) -> str:
    """Returns the place of the element with this number: ``[1, 2]``; empty in a number alone."""
    place = [int(i) for i in torch.unravel_index(torch.tensor(k), shape)]
    return f"{place}" if place else ""
