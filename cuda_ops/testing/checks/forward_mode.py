"""The derivative in forward mode: by finite differences, and the same by each way to ask for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from cuda_ops.testing.case import Case, NotRunError, check, defined
from cuda_ops.testing.checks.gradients import compare_with_differences, rows_of_each, without_wide
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import is_inexact


def _without(subject: Subject, device: str) -> str:
    if subject.op.is_composite:
        return "the derivative in forward mode is that of the operators it calls"
    if not subject.forward:
        op = subject.op
        return f"no derivative in forward mode: no {op.name}_jvp and no .linear in {op.declared_in}"
    reason = without_wide(subject, device)
    return reason if "float64" in reason else ""


@check("jvp", None, "the derivative in forward mode is wrong",
       Draw(2, range(1, 41), torch.float64, floating=True, beside=rows_of_each, choices=True),
       quick=True, excuse=_without)  # fmt: skip
def jvp(case: Case) -> None:
    """Compares tangents with finite differences, and those of ``torch.func.jvp`` with those of dual
    numbers.
    """
    args = case.arguments()
    along = [i for i in case.subject.forward if i < len(args) and is_inexact(args[i])]
    if not along:
        raise NotRunError("no floating argument has a derivative in forward mode")
    leaves = tuple(
        value.clone(memory_format=torch.contiguous_format).requires_grad_() if i in along else value
        for i, value in enumerate(args)
    )
    try:
        compare_with_differences(
            case, defined(case, leaves), _by_columns, check_backward_ad=False,
            check_forward_ad=True, check_undefined_grad=False,
        )  # fmt: skip
    except NotImplementedError as refusal:  # what is derived from the gradient is for real numbers
        if any(arg.dtype.is_complex for arg in case.sample.tensors):
            raise NotRunError(str(refusal)) from refusal
        raise

    generator = torch.Generator().manual_seed(case.sample.seed)
    tangents = [
        torch.randn(args[i].shape, generator=generator, dtype=args[i].dtype).to(args[i].device)
        for i in along
    ]

    def function(*values: Any) -> Any:
        given = dict(zip(along, values, strict=True))
        return case.operator(*(given.get(i, value) for i, value in enumerate(args)))

    primals = tuple(args[i] for i in along)
    found = torch.func.jvp(function, primals, tuple(tangents))[1]
    with forward_ad.dual_level():
        duals = function(*map(forward_ad.make_dual, primals, tangents))
        duals = duals if isinstance(duals, tuple) else (duals,)
        expected = [forward_ad.unpack_dual(dual).tangent for dual in duals]
    found = found if isinstance(found, tuple) else (found,)
    pairs = [(f, e) for f, e in zip(found, expected, strict=True) if e is not None]
    case.same([f for f, _ in pairs], [e for _, e in pairs], "torch.func.jvp")


def _by_columns(case: Case, leaves: tuple[Any, ...], which: int, x: torch.Tensor) -> torch.Tensor:
    columns = []
    for j in range(x.numel()):
        along = torch.zeros_like(x)
        along.view(-1)[j] = 1
        with forward_ad.dual_level():
            args = (forward_ad.make_dual(x, along) if leaf is x else leaf for leaf in leaves)
            result = case.call(*args)[which]
            tangent = forward_ad.unpack_dual(result).tangent
            columns.append((torch.zeros_like(result) if tangent is None else tangent).flatten())
    return torch.stack(columns, dim=1).detach()
