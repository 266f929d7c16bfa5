"""Class 11: vector accesses to memory that is not aligned for them."""

from __future__ import annotations

import torch

from cuda_ops.testing.case import Case, check
from cuda_ops.testing.draw import Draw

_OFFSETS = range(1, 8)


@check("alignment", 11, "misaligned vector access", Draw(4, range(8, 4097)), quick=True)
def alignment(case: Case) -> None:
    """Checks that contiguous views that start 1 to 7 elements into their storage change nothing."""
    args = case.arguments()
    expected = case.call(*args)
    tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
    alone = [(i,) for i in tensors] if len(tensors) > 1 else []
    for offset in _OFFSETS:
        for moved in (tuple(tensors), *alone):
            views = [_shifted(v, offset) if i in moved else v for i, v in enumerate(args)]
            names = ", ".join(f"'{case.subject.op.argument_names[i]}'" for i in moved)
            what = f"{names} {offset} elements into the storage"
            case.same(case.call(*views), expected, what)


def _shifted(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    storage = tensor.new_empty(tensor.numel() + offset)
    return storage[offset:].view(tensor.shape).copy_(tensor)
