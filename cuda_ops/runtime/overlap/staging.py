"""Pinned memory that is used again, and what goes through it on its way to a GPU."""

from __future__ import annotations

import torch

#: What the allocator of a GPU aligns to; more than any dtype needs.
_ALIGNMENT = 512


class Pinned:
    """Pinned memory of one batch, which grows to the largest one.

    A copy out of it runs later than the call that asks for it, so its user has to wait for that
    copy before :meth:`clear`.
    """

    def __init__(self, pin: bool = True) -> None:
        self._pin = pin
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._wanted = 0

    def clear(self) -> None:
        """Forgets what was put in. The memory is large enough for the same again."""
        if self._wanted > self._memory.numel():
            self._memory = torch.empty(self._wanted, dtype=torch.uint8, pin_memory=self._pin)
        self._used = self._wanted = 0

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a pinned copy of a strided CPU tensor, in the layout that ``tensor.to`` gives."""
        strides = torch.empty_like(tensor, device="meta").stride()
        size = tensor.numel() * tensor.element_size()
        start, self._used = self._used, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT
        self._wanted = self._used
        if self._used > self._memory.numel():  # until the next clear
            place = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        else:
            place = self._memory[start : start + size]
        copied = place.view(tensor.dtype).as_strided(tensor.shape, strides)
        return copied.copy_(tensor)


def stages(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has to be copied to pinned memory, and can be, by its bytes."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.numel() > 0
        and not tensor.is_pinned()
    )
