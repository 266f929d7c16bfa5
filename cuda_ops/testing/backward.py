"""Calls backward with gradients in the layouts that autograd hands to an operator, and under
activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from cuda_ops.testing.case import wanting
from cuda_ops.testing.samples import LAYOUTS, Sample, TensorArg
from cuda_ops.testing.tolerance import is_floating

#: What only gradients look like: of a sum along rows that is multiplied by a vector, and of a sum.
_ROW_SUM, _SUM = "alike along the last dim", "all alike"
#: The layouts of gradients, but for the contiguous one.
KINDS = (*LAYOUTS[1:], _ROW_SUM, _SUM)


def laid_out(output: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    """Returns a gradient for an output, in one of the layouts of samples or of gradients alone."""
    shape = tuple(output.shape)
    layout: Any = kind if kind in LAYOUTS else "contiguous"
    filled = {_ROW_SUM: (*shape[:-1], *[1][: len(shape)]), _SUM: ()}.get(kind, shape)
    (gradient,) = Sample((TensorArg(filled, output.dtype, layout),), seed=seed).make(output.device)
    made: torch.Tensor = gradient.expand(shape)
    return made


def backward(
    outputs: Sequence[torch.Tensor], leaves: tuple[Any, ...], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the gradient of each leaf that asks for one, zeros where nothing depends on it."""
    return list(
        torch.autograd.grad(
            outputs, wanting(leaves), gradients,
            retain_graph=True, allow_unused=True, materialize_grads=True,
        )
    )  # fmt: skip


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under ``torch.utils.checkpoint``.

    Where a function raises, torch 2.11 keeps its hooks on saved tensors until the traceback is
    freed, and they act on all calls until then. So an error leaves the checkpoint as a value.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        raised: list[Exception] = []
        is_first = True

        def caught(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not is_first:
                    raise  # torch stops the second call by an exception
                raised.append(error)
                return None

        found = checkpoint(caught, *args, use_reentrant=False, **kwargs)
        is_first = False
        if raised:
            raise raised.pop()
        return found

    return called


def differentiable(found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the outputs that have a gradient."""
    return [out for out in found if is_floating(out) and out.requires_grad]


def stepped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a leaf with the same numbers: every dim is stepped, and the last two are swapped."""
    value = tensor.detach()
    swapped = value.mT if value.dim() > 1 else value
    made = value.new_empty((*swapped.shape, 2)).copy_(swapped.unsqueeze(-1))[..., 0]
    return (made.mT if value.dim() > 1 else made).requires_grad_(tensor.requires_grad)
