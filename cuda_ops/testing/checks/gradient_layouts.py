"""Class 5: a backward that assumes contiguous tensors; and gradients of several outputs."""

from __future__ import annotations

from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.backward import KINDS, backward, differentiable, laid_out, stepped
from cuda_ops.testing.case import Case, NotRunError, called, check, without_gradient
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import is_floating


def _rows(op: OpSpec) -> list[Sample]:
    """Returns a call with dims that all have several elements, which drawn ones may not have."""
    return [shaped(op, (3, 4), core=5)]


@check("gradient_layouts", 5, "the backward assumes contiguous tensors",
       Draw(4, range(1, 513), floating=True, beside=_rows), quick=True,
       excuse=without_gradient)  # fmt: skip
def gradient_layouts(case: Case) -> None:
    """Checks that the same gradients, and the same inputs, give the same in other layouts."""
    leaves, outputs = _outputs(case)
    # Gradients go in as they are: an operation behind the operator would mostly copy them.
    for first in range(len(KINDS)):
        kinds = [KINDS[(first + i) % len(KINDS)] for i in range(len(outputs))]
        incoming = [
            laid_out(out, kind, i) for i, (out, kind) in enumerate(zip(outputs, kinds, strict=True))
        ]
        said = "; ".join(f"{kind}, {g.stride()}" for kind, g in zip(kinds, incoming, strict=True))
        dense = [g.clone(memory_format=torch.contiguous_format) for g in incoming]
        what = f"not the backward of the same gradient, contiguous (layout and strides: {said})"
        case.same(backward(outputs, leaves, incoming), backward(outputs, leaves, dense), what)
    gradients = [laid_out(out, "contiguous", i) for i, out in enumerate(outputs)]
    expected = backward(outputs, leaves, gradients)
    strided = tuple(stepped(leaf) if is_floating(leaf) else leaf for leaf in leaves)
    if (found := called(case, strided)) is None:
        return
    outputs = differentiable(found)
    what = "not the backward of the same inputs, contiguous (stepped inputs)"
    case.same(backward(outputs, strided, gradients), expected, what)


def _one_output(subject: Subject, device: str) -> str:
    several = len(subject.op.parsed.returns) - len(subject.op.constants) > 1
    return without_gradient(subject, device) if several else "it has one output with a gradient"


@check("gradient_outputs", None, "the gradients of several outputs do not add up",
       Draw(2, range(1, 513), floating=True), quick=True, excuse=_one_output)  # fmt: skip
def gradient_outputs(case: Case) -> None:
    """Checks that gradients through each output alone, the others missing or zero, add up to that
    through all. ``gradcheck`` asks for one output at a time.
    """
    leaves, outputs = _outputs(case)
    if len(outputs) < 2:
        raise NotRunError("no two floating outputs")
    gradients = [laid_out(out, "contiguous", i) for i, out in enumerate(outputs)]
    each = []
    for i, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        alone = backward([output], leaves, [gradient])
        zeros = [g if k == i else torch.zeros_like(g) for k, g in enumerate(gradients)]
        what = f"backward through output {i} alone is not that with zeros for the others"
        case.same(alone, backward(outputs, leaves, zeros), what)
        each.append(alone)
    sums = [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]
    # Beside the parts, a sum that cancels may be as wrong as its terms.
    parts = [part for alone in each for part in alone]
    together = backward(outputs, leaves, gradients)
    what = "backward through all outputs is not the sum of those through each alone"
    case.same([*together, *parts], [*sums, *parts], what)


def _outputs(case: Case) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    leaves = case.leaves()
    outputs = differentiable(case.call(*leaves))
    if not outputs:
        raise NotRunError("no floating outputs")
    return leaves, outputs
