"""``torch.utils.checkpoint``, which runs the operator again when its gradient is asked for."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from cuda_ops.testing.backward import checkpointed
from cuda_ops.testing.case import Case, NotRunError, check, sums, wanting, without_gradient
from cuda_ops.testing.draw import Draw


@check("checkpoint", None, "wrong under activation checkpointing",
       Draw(1, range(1, 513), floating=True), quick=True, excuse=without_gradient)  # fmt: skip
def checkpoint(case: Case) -> None:
    """Checks that a checkpointed call has the same gradient as the call."""
    leaves = case.leaves()

    def gradients(found: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        if not (ends := sums(found)):
            raise NotRunError("no floating outputs")
        # allow_unused gives None, which torch's type hints leave out.
        return list(
            filter(torch.is_tensor, torch.autograd.grad(ends, wanting(leaves), allow_unused=True))
        )

    expected = gradients(case.call(*leaves))
    # When it has recomputed enough, torch raises to stop early. A composed operator calls through
    # torch's C interface, which turns that into an error.
    with set_checkpoint_early_stop(not case.subject.op.is_composite):
        actual = gradients(case.results(checkpointed(case.operator), leaves))
    case.same(actual, expected, "the gradient of a checkpointed call")
