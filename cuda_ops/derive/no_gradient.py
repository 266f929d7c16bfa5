"""Refuses a gradient that does not exist where it would be computed; it is never zero.

torch.compile traces a gradient beside every forward pass whose arguments require one, whether or
not it is ever used. So the refusal is an operator: a trace has it in its backward, which raises if
it is run at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch

from cuda_ops.names import INTERNAL
from cuda_ops.spec import Autograd

#: In what is said of an output whose gradient would be lost.
LOST = "has no gradient through"

# Kept apart from the operators of cuda_ops, which users list.
_library = torch.library.Library(INTERNAL, "DEF")
# `grad` ties it to the backward; if it depended on nothing there, it might run in the forward.
_library.define(
    "no_gradient(Tensor grad, SymInt[] size, str reason) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_library, "no_gradient", "CompositeExplicitAutograd")
def _refuse(grad: torch.Tensor, size: Sequence[int], reason: str) -> NoReturn:
    raise RuntimeError(reason)


torch.library.register_fake(
    f"{INTERNAL}::no_gradient", lambda grad, size, reason: grad.new_empty(size), lib=_library
)
# Refuses the gradient of an output that the formula does not take. A trace passes zeros there if
# the loss does not depend on that output.
_library.define(
    "only_zeros(Tensor grad, str reason) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)


@torch.library.impl(_library, "only_zeros", "CompositeExplicitAutograd")
def _refuse_others(grad: torch.Tensor, reason: str) -> torch.Tensor:
    if grad.any():
        raise RuntimeError(reason)
    return grad.new_zeros(())


torch.library.register_fake(
    f"{INTERNAL}::only_zeros", lambda grad, reason: grad.new_empty(()), lib=_library
)
torch.library.register_vmap(
    f"{INTERNAL}::only_zeros",
    lambda info, in_dims, grad, reason: (torch.ops._cuda_ops.only_zeros(grad, reason), None),
    lib=_library,
)


def _mapped(
    info: Any, in_dims: Sequence[int | None], grad: torch.Tensor, size: Sequence[int], reason: str
) -> tuple[torch.Tensor, int]:
    return no_gradient(grad, (info.batch_size, *size), reason), 0


torch.library.register_vmap(f"{INTERNAL}::no_gradient", _mapped, lib=_library)


def no_gradient(grad: torch.Tensor, size: Sequence[int], reason: str) -> torch.Tensor:
    """Stands in for the gradient of an argument of this size.

    Raises:
        RuntimeError: with ``reason``, unless this is a trace.
    """
    refused: torch.Tensor = torch.ops._cuda_ops.no_gradient(grad, size, reason)
    return refused


def refuse_lost(grad: torch.Tensor, lost: torch.Tensor, reason: str) -> torch.Tensor:
    """Returns ``grad``, unless ``lost``, which nothing takes, is more than zeros.

    Raises:
        RuntimeError: with ``reason``; in a trace when it is run.
    """
    with torch.no_grad():  # not lost.detach(), for which torch has no rule in batched gradients
        zero: torch.Tensor = torch.ops._cuda_ops.only_zeros(lost, reason)
    return grad + zero.to(grad.dtype)  # a trace drops what nothing uses


@dataclass(frozen=True)
class NoGradient:
    """The ``backward`` of an operator without a gradient; ``reason`` names it."""

    reason: str

    def __call__(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        given = chain(*(grad if isinstance(grad, (list, tuple)) else [grad] for grad in grads))
        grad = next((grad for grad in given if grad is not None), None)
        if grad is None:
            raise RuntimeError(self.reason)

        # Transforms count keyword-only arguments too, which never have a gradient.
        return tuple(
            refused(grad, size, wanted, self.reason)
            for wanted, size in zip(ctx.needs_input_grad, ctx.sizes, strict=False)
        )


def refused(grad: torch.Tensor, size: Any, wanted: Any, reason: str) -> Any:
    """Stands in for the gradient of one argument, or for those of a list of tensors."""
    if isinstance(wanted, (list, tuple)):
        pairs = zip(size, wanted, strict=True)
        return [refused(grad, one, whether, reason) for one, whether in pairs]
    return no_gradient(grad, size, reason) if wanted else None


def refusal(reason: str, constants: Sequence[int] = ()) -> Autograd:
    """Returns the formula of an operator without a gradient. The outputs at the positions
    ``constants`` need none.
    """

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None
    ) -> None:
        ctx.sizes = [sizes_of(value) for value in inputs]
        if constants:
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.mark_non_differentiable(*(outputs[i] for i in constants))

    return Autograd(setup_context, NoGradient(reason))


def no_second_derivative(gradient: str) -> Autograd:
    """Returns the formula of an operator, named ``gradient``, that computes one and has none."""
    return refusal(f"{gradient} has no gradient: second derivatives are not computed")


def sizes_of(value: Any) -> Any:
    """Returns the size of a tensor, those of a list of tensors, or ``None``."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return [sizes_of(one) for one in value] if isinstance(value, (list, tuple)) else None
