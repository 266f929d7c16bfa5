"""The public function, which bypasses the dispatcher where it may, against the dispatcher."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cuda_ops.registry import registry
from cuda_ops.spec import default_of
from cuda_ops.testing.arguments import by_keyword, in_order
from cuda_ops.testing.case import Case, check, sums, wanting
from cuda_ops.testing.compare import results, without_hidden
from cuda_ops.testing.draw import Draw, ordinary
from cuda_ops.testing.subject import Subject


def _not_ours(subject: Subject, device: str) -> str:
    return "not an operator of cuda_ops" if subject.op.foreign else ""


@check("public", None, "the public function differs from the operator",
       Draw(4, adapt=ordinary), quick=True, excuse=_not_ours)  # fmt: skip
def public(case: Case) -> None:
    """Compares results and gradients, with autograd, without it, and in inference mode; and each
    default with the schema's.
    """
    function, op = in_order(case.subject.op, case.subject.op.function), case.operator
    case.same(_results(function, case), _results(op, case), "cuda_ops.<op>")
    args = case.arguments()
    if hidden := case.subject.op.hidden:
        name = case.subject.op.key
        ordered = by_keyword if case.subject.op.draws else in_order  # a random key comes last
        called = ordered(case.subject.op, registry().public(name))
        shown = results(case.subject.op, called, args)
        seen, _ = without_hidden(case.subject.op, expected := case.call(*args), shown)
        assert len(shown) < len(expected), f"cuda_ops.{name} returns {hidden[0]!r}, which is hidden"
        case.same(shown, seen, "what cuda_ops.<op> returns")
    _defaults(case)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual, expected = case.results(function, args), case.call(*args)
        case.same(actual, expected, f"cuda_ops.<op> under {mode.__name__}")


def _defaults(case: Case) -> None:
    """Compares calls that leave one argument out with calls that give the schema's default."""
    op = case.subject.op
    try:
        function = registry().public(op.key)
    except AttributeError:  # registered by a test, and no attribute of cuda_ops
        return
    try:
        shown = inspect.signature(function).parameters
    except ValueError:  # a function in C need not say what it takes
        return
    args = case.arguments()
    names = op.argument_names[: len(args)]
    if not set(names) <= shown.keys():
        return  # a plugin's function may take other arguments
    for argument in op.parsed.arguments:
        name = argument.name
        if not argument.has_default_value() or name not in shown:
            continue
        default = default_of(argument)
        text = f"the schema's default of '{name}' is {default!r}, cuda_ops.{op.key} has"
        assert shown[name].default is not inspect.Parameter.empty, f"{text} none"

        def called(*values: Any, without: str = name, **given: Any) -> Any:
            passed = dict(zip(names, values, strict=True))
            passed.pop(without, None)
            return function(**passed, **given)

        try:
            expected = case.results(partial(called, **{name: default}), args)
        except (RuntimeError, ValueError):
            continue  # not beside the other arguments
        what = f"{text} {shown[name].default!r}: without it"
        case.same(case.results(called, args), expected, what)


def _results(function: Callable[..., Any], case: Case) -> list[torch.Tensor]:
    """Returns outputs and, if there are any, gradients."""
    leaves = case.leaves()
    values = list(case.results(function, leaves))
    if case.subject.gradient == "declared" and (ends := sums(values)):
        values += filter(torch.is_tensor, torch.autograd.grad(ends, wanting(leaves)))
    return values
