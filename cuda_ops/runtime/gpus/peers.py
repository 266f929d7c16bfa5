"""Copies between devices: straight where they reach each other, else in chunks through the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from cuda_ops.runtime.arguments import check_count

#: Bytes of a chunk: large enough that a copy takes longer than its launch, small enough that the
#: first half of the way is soon done. Two chunks are pinned at a time.
CHUNK_BYTES = 4 << 20
#: One is filled while the other is emptied.
_SLOTS = 2


def copy_between(
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    chunks_through_host: bool | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """Copies ``src`` to ``dst``, which may be on another device, and returns ``dst``.

    Between two GPUs the copy is queued behind what is queued on the current streams of both, and
    what is queued there afterwards comes after it; the host goes on at once. With peer access that
    is ``dst.copy_(src, non_blocking=True)``. Without it the bytes go through two pinned chunks on
    streams of their own, so that both halves of the way are busy at once. Where one side is on the
    CPU, the copy is done when this returns.

    No gradient goes through the copy. Do not capture it into a CUDA graph.

    >>> x = torch.arange(6).reshape(2, 3)
    >>> copy_between(torch.empty(3, 2, dtype=torch.int64).t(), x).tolist()
    [[0, 1, 2], [3, 4, 5]]

    Args:
        dst: the tensor to write, of any strides that give each element its own memory.
        src: the tensor to read, of the shape and dtype of ``dst`` and of any strides.
        chunks_through_host: whether to copy in chunks; by default where two GPUs have no peer
            access. ``True`` does so between any devices, with plain copies on a CPU.
        chunk_bytes: the size of a chunk.

    Raises:
        TypeError: ``dst`` or ``src`` is no tensor.
        ValueError: shapes, dtypes or layouts differ, a device is neither a CPU nor a GPU, elements
            of ``dst`` share memory, as after ``expand``, or ``chunk_bytes`` is no int of 1 or more.
        RuntimeError: the current stream is being captured.
    """
    _check(dst, src, chunk_bytes)
    on_cuda = [tensor.device for tensor in (dst, src) if tensor.device.type == "cuda"]
    if any(_captures(device) for device in on_cuda):
        raise RuntimeError("copy_between: expected a stream that is not being captured")
    if chunks_through_host is None:
        chunks_through_host = (
            len(on_cuda) == 2
            and dst.device != src.device
            and not torch.cuda.can_device_access_peer(dst.device, src.device)
        )
    with torch.no_grad():
        # torch refuses tensors that overlap, which chunks would not notice.
        shared = dst.untyped_storage()._cdata == src.untyped_storage()._cdata
        if chunks_through_host and not shared:
            _copy_in_chunks(dst, src, chunk_bytes)
            if len(on_cuda) == 1:
                torch.cuda.current_stream(on_cuda[0]).synchronize()
        else:
            # torch waits for both current streams, and lets both wait for the copy.
            dst.copy_(src, non_blocking=len(on_cuda) == 2)
    return dst


def spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Cuts ``total`` bytes into spans of ``size``, the last one shorter.

    >>> list(spans(10, 4)), list(spans(0, 4))
    ([(0, 4), (4, 8), (8, 10)], [])
    """
    for start in range(0, total, size):
        yield start, min(start + size, total)


def _copy_in_chunks(dst: torch.Tensor, src: torch.Tensor, chunk_bytes: int) -> None:
    plain = dst.is_contiguous() and not dst.is_conj() and not dst.is_neg()
    dense = dst if plain else torch.empty(dst.shape, dtype=dst.dtype, device=dst.device)
    read, written = _bytes(src.resolve_conj().resolve_neg().contiguous()), _bytes(dense)
    slot = min(chunk_bytes, read.numel())
    pin = "cuda" in (dst.device.type, src.device.type)
    slots = [torch.empty(slot, dtype=torch.uint8, pin_memory=pin) for _ in range(_SLOTS)]
    down, up = _Side(src.device), _Side(dst.device)
    down.begin(read)
    up.begin(written)
    emptied: list[torch.cuda.Event | None] = [None] * _SLOTS
    for number, (start, stop) in enumerate(spans(read.numel(), chunk_bytes)):
        at = number % _SLOTS
        chunk = slots[at][: stop - start]
        # torch's pinned memory outlives the copies that are queued: they record their streams.
        filled = down.copy(chunk, read[start:stop], after=emptied[at])
        emptied[at] = up.copy(written[start:stop], chunk, after=filled)
    down.end()
    up.end()
    if dense is not dst:
        dst.copy_(dense)


class _Side:
    """One half of the way: a stream of its own on a GPU, the host itself on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def begin(self, tensor: torch.Tensor) -> None:
        """Waits for what the current stream has queued for the tensor, and keeps its memory."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            # Its memory belongs to another stream, which may give it away while this one copies.
            tensor.record_stream(self._stream)

    def copy(
        self, to: torch.Tensor, what: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copies after an event of the other side; returns one that tells when it is done."""
        if self._stream is None:
            if after is not None:
                after.synchronize()
            to.copy_(what)
            return None
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            to.copy_(what, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def end(self) -> None:
        """Lets the current stream wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, as a view."""
    # A dim of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _captures(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _check(dst: Any, src: Any, chunk_bytes: int) -> None:
    for name, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"copy_between: argument {name!r}: expected a Tensor, got {type(tensor).__name__}"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"copy_between: argument {name!r}: expected a strided tensor, got {tensor.layout}"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"copy_between: argument {name!r}: expected a tensor on a CPU or CUDA device, got "
                f"one on {str(tensor.device)!r}"
            )
    for what, wanted, actual in (
        ("shape", list(dst.shape), list(src.shape)),
        ("dtype", dst.dtype, src.dtype),
    ):
        if wanted != actual:
            raise ValueError(
                f"copy_between: argument 'src': expected the {what} of dst, {wanted}, got {actual}"
            )
    if dst.numel() and any(n > 1 and not s for n, s in zip(dst.shape, dst.stride(), strict=True)):
        raise ValueError(
            "copy_between: argument 'dst': expected elements with memory of their own, got shape "
            f"{list(dst.shape)} with strides {list(dst.stride())}, as expand makes"
        )
    check_count("copy_between", "chunk_bytes", chunk_bytes)
