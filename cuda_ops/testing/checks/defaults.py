"""What an argument is that a call leaves out."""

from __future__ import annotations

import inspect

from cuda_ops.spec import default_of
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.subject import Subject


def _nothing_to_compare(subject: Subject, device: str) -> str:
    if not any(argument.has_default_value() for argument in subject.op.parsed.arguments):
        return "no argument has a default"
    return "" if _known(subject) else "the reference has no defaults"


@check("defaults", None, "a default is not the reference's", Draw(1), devices=("cpu",), quick=True,
       excuse=_nothing_to_compare)  # fmt: skip
def defaults(case: Case) -> None:
    """Compares each default of the schema with that of the reference's parameter of this name."""
    known = _known(case.subject)
    for argument in case.subject.op.parsed.arguments:
        if argument.name not in known or not argument.has_default_value():
            continue
        mine, theirs = default_of(argument), known[argument.name].default
        theirs = list(theirs) if isinstance(theirs, tuple) else theirs  # a list would be shared
        assert mine == theirs, (
            f"the schema's default of '{argument.name}' is {mine!r}, the reference's {theirs!r}"
        )


def _known(subject: Subject) -> dict[str, inspect.Parameter]:
    """Returns the reference's parameters that have defaults."""
    if subject.reference is None:
        return {}
    try:
        parameters = inspect.signature(subject.reference).parameters
    except (TypeError, ValueError):  # an operator, or a function in C
        return {}
    return {name: p for name, p in parameters.items() if p.default is not p.empty}
