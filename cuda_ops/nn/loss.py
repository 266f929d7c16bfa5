"""The cross entropy of a softmax."""

from __future__ import annotations

from typing import Any

import torch

import cuda_ops
from cuda_ops.derive.checks import names_text
from cuda_ops.nn._like_torch import (
    is_int,
    kind_of,
    must_be_bool,
    must_be_number,
    must_be_tensor,
    refuse,
    refuse_call,
    widened,
)

_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` by :func:`cuda_ops.softmax_cross_entropy`.

    The logits are read once, and once more for the gradient; no copy of them is made. Classes are
    the second dim, as for torch's; with more than two dims the classes of a place do not lie
    together, so the operator copies the logits.

    State dict: empty.
    Shapes: input (C), (N, C) or (N, C, d1, ...), target (), (N) or (N, d1, ...); the result has no
    dims, or the shape of the target with reduction "none".
    Dtypes: input float64, float32, float16 or bfloat16, and the result the same; target int64.
    Under autocast a half is taken to float32 first, as torch does.

    Args:
        weight: None.
        size_average, reduce: deprecated, as torch's.
        ignore_index: targets that have no loss and no gradient, and do not count in a mean.
        reduction: "mean", "sum" or "none".
        label_smoothing: from 0 to 1.
        overwrite_logits: write the gradient over the logits, one tensor of their size less.

    Errors: ValueError for a weight, or any other argument of the constructor that is not as above;
    RuntimeError for probabilities in place of indices, other dtypes or shapes, second derivatives,
    and on the CPU an index out of range. On a GPU the loss of such a row is NaN.
    Formula: that of cuda_ops.softmax_cross_entropy.

    Example:
    >>> cuda_ops.nn.CrossEntropyLoss()(torch.zeros(2, 8), torch.tensor([3, -100]))
    tensor(2.0794)
    """

    #: Also for modules that were torch's.
    overwrite_logits: bool = False

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        overwrite_logits: bool = False,
    ) -> None:
        if weight is not None:
            expected = "None, since the operator has no factors of classes"
            refuse("CrossEntropyLoss", "weight", expected, weight)
        if not is_int(ignore_index):
            refuse("CrossEntropyLoss", "ignore_index", "an int", ignore_index)
        if reduction not in _REDUCTIONS:
            refuse("CrossEntropyLoss", "reduction", names_text(_REDUCTIONS), reduction)
        must_be_number("CrossEntropyLoss", "label_smoothing", label_smoothing, 1)
        must_be_bool("CrossEntropyLoss", "overwrite_logits", overwrite_logits)
        super().__init__(None, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.overwrite_logits = overwrite_logits

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        must_be_tensor(self, "input", input)
        given: Any = target
        if not isinstance(given, torch.Tensor) or given.is_floating_point():
            probabilities = isinstance(given, torch.Tensor)
            got = f"probabilities, {given.dtype}" if probabilities else kind_of(given)
            advice = ": keep torch.nn.CrossEntropyLoss" if probabilities else ""
            refuse_call(self, "target", "indices of classes, int64", f"{got}{advice}")
        logits = widened(input, "nll_loss")
        logits = logits if logits.dim() < 3 else logits.movedim(1, -1)
        if target.shape != logits.shape[:-1]:  # which the operator would broadcast
            expected = f"shape {list(logits.shape[:-1])} for an input of shape {list(input.shape)}"
            refuse_call(self, "target", expected, f"{list(target.shape)}")
        loss: torch.Tensor = cuda_ops.softmax_cross_entropy(
            logits,
            target,
            self.ignore_index,
            self.label_smoothing,
            self.reduction,
            self.overwrite_logits,
        )
        return loss

    def extra_repr(self) -> str:
        """Returns what differs between losses."""
        return (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"reduction={self.reduction!r}, overwrite_logits={self.overwrite_logits}"
        )
