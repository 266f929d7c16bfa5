"""Tensors between zones of known bytes, for checks of what an operator reads and writes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from cuda_ops.testing.allocations import ROUNDED, bytes_at

#: Bytes on either side; a multiple of every alignment that kernels ask for.
_GUARD = 4096


class Guarded:
    """A contiguous copy of a tensor between two zones of one byte."""

    def __init__(self, tensor: torch.Tensor, byte: int) -> None:
        # Beside integers and bools the byte is 0 or 1: an index read there must not lead far away.
        self._byte = byte if tensor.is_floating_point() else byte & 1
        size = tensor.nbytes + 2 * _GUARD
        self._bytes = torch.full((size,), self._byte, dtype=torch.uint8, device=tensor.device)
        self._end = _GUARD + tensor.nbytes
        inner = self._bytes[_GUARD : self._end].view(tensor.dtype)
        self.tensor = inner.view(tensor.shape).copy_(tensor)

    def intact(self) -> bool:
        zones = torch.cat([self._bytes[:_GUARD], self._bytes[self._end :]])
        return bool((zones == self._byte).all())


def guard(args: tuple[Any, ...], byte: int) -> tuple[list[Any], dict[int, Guarded]]:
    """Returns the arguments with every tensor guarded, and the guards by position."""
    guards = {i: Guarded(v, byte) for i, v in enumerate(args) if isinstance(v, torch.Tensor)}
    return [guards[i].tensor if i in guards else v for i, v in enumerate(args)], guards


def behind(output: torch.Tensor) -> torch.Tensor | None:
    """Returns the bytes by which the allocator rounded an output up; ``None`` if it did not."""
    nbytes = output.untyped_storage().nbytes()
    if output.device.type == "cpu" and nbytes:
        return _behind_on_cpu(output.untyped_storage())
    length = -nbytes % ROUNDED
    if output.device.type != "cuda" or not nbytes or not length:
        return None
    return bytes_at(output.untyped_storage().data_ptr() + nbytes, length, output.device)


def rounded_by_malloc(nbytes: int) -> int:
    """Returns the bytes that glibc gives for a request: that and its own 8, rounded up to 16."""
    return (nbytes + 23) // 16 * 16 - 8


def _behind_on_cpu(storage: torch.UntypedStorage) -> torch.Tensor | None:
    """Returns what glibc's allocator has behind a tensor of torch's own allocator."""
    usable = getattr(ctypes.CDLL(None), "malloc_usable_size", None)
    if usable is None or not storage.resizable():  # memory of NumPy, say, is not torch's
        return None
    usable.restype, usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    start, nbytes = storage.data_ptr(), storage.nbytes()
    # glibc does not fill what a chunk has beyond.
    end = min(usable(start), rounded_by_malloc(nbytes))
    zone = ctypes.string_at(start + nbytes, max(0, end - nbytes))
    return torch.frombuffer(bytearray(zone), dtype=torch.uint8) if zone else None
