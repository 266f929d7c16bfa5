"""Memory that a graph reads and writes, which a call is copied into and results out of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Tensors = Sequence[torch.Tensor]

#: What torch copies in one launch for many tensors.
_TOGETHER = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
#: Dtypes of which each value times 1 is the value.
_EXACT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Places:
    """Tensors that others are copied into, in as few launches as torch makes of it.

    No gradients may be recorded where they are.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._bases = [base_of(tensor) for tensor in tensors]
        #: Dims of which one element stands for all.
        self._repeated = [
            [dim for dim, size in enumerate(base.shape) if size != tensor.size(dim)]
            for base, tensor in zip(self._bases, tensors, strict=True)
        ]
        self._any_repeated = any(self._repeated)
        # One alone is faster by a copy of its own.
        self._together = len(tensors) > 1 and all(base.dtype in _TOGETHER for base in self._bases)

    def fill(self, sources: Tensors) -> None:
        if self._any_repeated:
            sources = list(map(_narrowed, sources, self._repeated))
        if self._together:
            torch._foreach_copy_(self._bases, list(sources))
        else:
            for base, source in zip(self._bases, sources, strict=True):
                base.copy_(source)


class Sources:
    """Tensors that are copied out to new memory, in as few launches as torch makes of it."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = list(tensors)
        dtypes = {tensor.dtype if tensor.layout == torch.strided else None for tensor in tensors}
        self._together = len(tensors) > 1 and len(dtypes) == 1 and dtypes <= _EXACT

    def copies(self) -> list[torch.Tensor]:
        if self._together:
            # A product by 1 is a copy, and one call allocates and launches for all tensors. Clones
            # cost the host that for each; one for all is something torch does not have before 2.13.
            return list(torch._foreach_mul(self._tensors, 1.0))
        return [tensor.clone() for tensor in self._tensors]


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the strides of the tensor, unless several elements share memory in
    another way than by a stride of 0.
    """
    with torch.inference_mode(False), torch.no_grad():  # or nothing counts its versions
        base = base_of(tensor)
        if torch._debug_has_internal_overlap(base) == 1:
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            copied = torch.empty_strided(
                base.shape, base.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(base)
            if base.shape != tensor.shape:
                copied = copied.expand(tensor.shape)
    return copied.requires_grad_(tensor.requires_grad)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without the repetitions of dims that were expanded."""
    repeated = [k for k in range(tensor.dim()) if tensor.stride(k) == 0 and tensor.size(k) > 1]
    return _narrowed(tensor.detach(), repeated)


def _narrowed(tensor: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor
