"""What the backward reads of the forward: tensors that may have changed, and those not asked of."""

from __future__ import annotations

from typing import Any

import torch

from cuda_ops.testing.backward import backward, differentiable, laid_out
from cuda_ops.testing.case import Case, NotRunError, check, wanting, without_gradient
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.subject import Subject

#: In what torch says of a saved tensor that has changed since.
_NOTICED = "modified by an inplace operation"


def _writes_nothing(subject: Subject, device: str) -> str:
    if subject.op.written:
        return "it writes an argument"
    return without_gradient(subject, device)


@check("saved", None, "the backward reads what may have changed since the forward",
       Draw(2, range(1, 513), floating=True), quick=True, excuse=_writes_nothing)  # fmt: skip
def saved(case: Case) -> None:
    """Checks that the gradient stays the same, or torch refuses it, where an argument or a result
    is changed in place between forward and backward: torch watches what ``ctx.save_for_backward``
    keeps, and nothing else.
    """
    expected = _gradients(case, None)
    op, args = case.subject.op, case.arguments()
    given = [("argument", i) for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
    for kind, place in (*given, *(("result", k) for k in range(len(op.parsed.returns)))):
        try:
            found = _gradients(case, (kind, place))
        except RuntimeError as refusal:
            if _NOTICED not in str(refusal):
                raise
            continue
        name = f"'{op.argument_names[place]}'" if kind == "argument" else f"output {place}"
        what = (
            f"{name} was changed in place after the forward, and the gradient with it; keep it "
            "with ctx.save_for_backward, which torch watches"
        )
        case.same(found, expected, what)


def _gradients(case: Case, changed: tuple[str, int] | None) -> list[torch.Tensor]:
    """Returns the gradients, after one argument or result was overwritten, if one is named."""
    leaves = case.leaves()
    found = case.call(*leaves)
    outputs = differentiable(found)
    if not outputs:
        raise NotRunError("no floating outputs")
    incoming = [laid_out(out, "contiguous", i) for i, out in enumerate(outputs)]
    if changed is not None:
        kind, place = changed
        value: Any = leaves[place] if kind == "argument" else found[place]
        with torch.no_grad():
            value.zero_() if kind == "argument" else value.fill_(1)
    return backward(outputs, leaves, incoming)


def _one_gradient(subject: Subject, device: str) -> str:
    if reason := without_gradient(subject, device):
        return reason
    return "" if len(subject.op.tensor_positions) > 1 else "it has one tensor"


@check("frozen", None, "a gradient changes when another argument needs none",
       Draw(2, range(1, 513), floating=True), quick=True, excuse=_one_gradient)  # fmt: skip
def frozen(case: Case) -> None:
    """Checks that each argument gets the same gradient where it alone asks for one, as beside the
    frozen weights of a model.
    """
    leaves = case.leaves()
    asking = [i for i, leaf in enumerate(leaves) if getattr(leaf, "requires_grad", False)]
    if len(asking) < 2 or len(wanting(leaves)) != len(asking):
        raise NotRunError("no two arguments ask for a gradient")
    outputs = differentiable(case.call(*leaves))
    if not outputs:
        raise NotRunError("no floating outputs")
    incoming = [laid_out(out, "contiguous", i) for i, out in enumerate(outputs)]
    expected = backward(outputs, leaves, incoming)
    for place, whole in zip(asking, expected, strict=True):
        alone = tuple(
            leaf.detach() if i in asking and i != place else leaf for i, leaf in enumerate(leaves)
        )
        found = differentiable(case.call(*alone))
        name = case.subject.op.argument_names[place]
        if len(found) != len(outputs):  # some results depend on other arguments alone
            continue
        what = f"the gradient of '{name}', where it alone asks for one, is not that beside others"
        case.same(backward(found, alone, incoming), [whole], what)
