"""Arguments that a call leaves out."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from cuda_ops.spec import default_of
from cuda_ops.testing.arguments import in_order, sampled_arguments
from cuda_ops.testing.case import Case, check, sums, wanting
from cuda_ops.testing.draw import Draw, ordinary
from cuda_ops.testing.subject import Subject


def _without_defaults(subject: Subject, device: str) -> str:
    has = any(argument.has_default_value() for argument in subject.op.parsed.arguments)
    return "" if has else "no argument has a default"


@check("defaults", None, "wrong where arguments are left out",
       Draw(2, range(1, 513), adapt=ordinary), quick=True, excuse=_without_defaults)  # fmt: skip
def defaults(case: Case) -> None:
    """Compares each default of the schema with the reference's; then results and gradients of calls
    that leave out arguments at the end with those of calls that pass their defaults.
    """
    _compare_with_the_reference_s(case)
    arguments = sampled_arguments(case.subject.op)[: len(case.sample.args)]
    count = len(arguments)
    while count and arguments[count - 1].has_default_value():
        count -= 1
        given = [default_of(argument) for argument in arguments[count:]]
        names = ", ".join(f"'{argument.name}'" for argument in arguments[count:])
        full, short = case.leaves(), case.leaves()
        try:
            expected = _results(case, (*full[:count], *given))
        except (RuntimeError, ValueError):  # these defaults go with other arguments
            continue
        case.same(_results(case, short[:count]), expected, f"without {names}")


def _compare_with_the_reference_s(case: Case) -> None:
    op, reference = case.subject.op, case.subject.reference
    try:
        known = inspect.signature(reference).parameters if reference is not None else {}
    except (TypeError, ValueError):  # an operator, or a function in C
        return
    for argument in op.parsed.arguments:
        parameter = known.get(argument.name)
        if parameter is None or not argument.has_default_value():
            continue
        mine, theirs = default_of(argument), parameter.default
        assert theirs is parameter.empty or mine == theirs, (
            f"the schema's default of '{argument.name}' is {mine!r}, the reference's {theirs!r}"
        )


def _results(case: Case, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Returns outputs and, if there are any, gradients."""
    values = list(case.results(in_order(case.subject.op, case.subject.op.overload), args))
    if case.subject.gradient == "declared" and (ends := sums(values)):
        found = torch.autograd.grad(ends, wanting(args), allow_unused=True)
        values += filter(torch.is_tensor, found)
    return values
