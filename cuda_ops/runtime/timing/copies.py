"""Copies of given arguments, for calls that are timed one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from cuda_ops.benchmarking.rotation import Rotation, _once
from cuda_ops.spec import BenchmarkCase

#: Where a copy of an argument begins, relative to what kernels ask for at most, in bytes.
_ALIGNMENT = 256


class Copies(Rotation):
    """Copies of given arguments; for warm caches all calls get the same one."""

    def __init__(self, args: tuple[Any, ...], device: torch.device, calls: int, cold: bool) -> None:
        case = BenchmarkCase("arguments", lambda device: copied(args), bytes=0)
        super().__init__(case, device, calls if cold else 2)
        if not cold:
            self.arguments = [self.arguments[0]] * calls

    def advance(self) -> None:
        with torch.no_grad():  # arguments may be leaves that want gradients
            super().advance()


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    copies: dict[int, torch.Tensor] = {}  # an argument that is passed twice stays one tensor

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copy(tensor)
        return copies[id(tensor)]

    made: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, copy, args)
    return made


@torch.no_grad()
def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor with its strides and alignment, on which a kernel's path may depend."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or not tensor.numel():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    skipped = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(skipped + last + 1, dtype=tensor.dtype, device=tensor.device)
    copy = memory.as_strided(tensor.shape, tensor.stride(), skipped)
    _once(copy).copy_(_once(tensor))
    return copy.requires_grad_(tensor.requires_grad)
