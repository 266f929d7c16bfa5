"""What a call allocates on a GPU: which bytes, what lies around them, and bytes of any address."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")
#: The CUDA caching allocator rounds sizes up to this, and the bytes in between belong to no tensor.
ROUNDED = 512
#: It takes requests up to this from other memory than larger ones.
SMALL = 1 << 20


@dataclass(frozen=True)
class Allocation:
    """One allocation of the caching allocator."""

    address: int
    #: Bytes, as they were asked for.
    size: int

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def rounded(self) -> int:
        """Bytes with those that belong to no tensor."""
        return -(-self.size // ROUNDED) * ROUNDED


def bytes_at(address: int, size: int, device: torch.device | str | int) -> torch.Tensor:
    """Returns a tensor of bytes that belong to the allocator or to another tensor."""
    where = torch.device("cuda", index_of(device))
    # Without NumPy, which torch wants for the interface of CUDA arrays.
    storage = torch._C._construct_storage_from_data_pointer(address, where, size)
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage)


def index_of(device: torch.device | str | int) -> int:
    """Returns the index of a GPU: that of the current one for ``"cuda"``."""
    if isinstance(device, int):
        return device
    where = str(torch.device(device))
    return torch.device(where).index if ":" in where else torch.cuda.current_device()


def recorded(device: torch.device | str, call: Callable[[], T]) -> tuple[T, list[dict[str, Any]]]:
    """Returns the result of a call, and what the allocator has done for it, in order."""
    index = index_of(device)
    record = torch.cuda.memory._record_memory_history
    record("all", context=None, stacks="python", max_entries=10_000)
    try:
        result = call()
        return result, torch.cuda.memory._snapshot(index)["device_traces"][index]
    finally:
        record(None)


def allocations(events: Sequence[dict[str, Any]]) -> list[Allocation]:
    """Returns the allocations among what :func:`recorded` does."""
    return [Allocation(e["addr"], e["size"]) for e in events if e["action"] == "alloc"]


def reuses_memory(device: torch.device | str, call: Callable[[], object]) -> bool:
    """Tells whether the call of a function allocates memory on a GPU that it has freed itself."""
    _, events = recorded(device, call)
    freed: set[int] = set()
    for event in events:
        if event["action"] == "free_requested":
            freed.add(event["addr"])
        elif event["action"] == "alloc" and event["addr"] in freed:
            return True
    return False


#: Bytes of a fence: at least so many, and beside large memory at most so many.
_LEAST_FENCE, _MOST_FENCE = 4096, 32 << 20


@dataclass
class Fences:
    """Free memory in a pool, piece by piece, between fences of one byte which are in use."""

    fence_byte: int
    inner_byte: int
    fences: list[torch.Tensor] = field(default_factory=list)
    pieces: list[Allocation] = field(default_factory=list)
    #: Gives its memory back when it ends: after the tensors above, and after :meth:`written`.
    pool: Any = None

    def written(self, made: Sequence[Allocation]) -> str:
        """Returns what was written beside the allocations that were made; empty if nothing was."""
        largest: dict[int, int] = {}  # memory may have been given out several times
        for one in made:
            largest[one.address] = max(one.size, largest.get(one.address, 0))
        for piece in self.pieces:
            size = largest.get(piece.address, piece.size)
            if size < piece.size:
                rest = bytes_at(piece.address + size, piece.size - size, self.fences[0].device)
                if (at := _first_other(rest, self.inner_byte)) is not None:
                    return f"{at} bytes behind the {size}"
        for fence in self.fences:
            if (at := _first_other(fence, self.fence_byte)) is None:
                continue
            start, end = fence.data_ptr(), fence.data_ptr() + fence.numel()
            before = [p for p in self.pieces if p.end == start]
            after = [p for p in self.pieces if p.address == end]
            if before and (at < fence.numel() // 2 or not after):
                size = largest.get(before[0].address, before[0].size)
                return f"{at + before[0].size - size} bytes behind the {size}"
            last = _first_other(fence.flip(0), self.fence_byte)
            if after and last is not None:
                size = largest.get(after[0].address, after[0].size)
                return f"{last + 1} bytes in front of the {size}"
            return f"{at} bytes into memory beside those"
        return ""


def _first_other(values: torch.Tensor, byte: int) -> int | None:
    others = (values != byte).nonzero()
    return int(others[0]) if others.numel() else None


@contextlib.contextmanager
def fenced(
    device: torch.device | str, sizes: Sequence[int], fence_byte: int, inner_byte: int
) -> Iterator[Fences]:
    """Has the allocator give out memory for which the size is one of these between fences.

    It takes the smallest piece of free memory that is large enough. Those here have the sizes that
    a call has just asked for, and what is between them is in use.
    """
    index, pool = index_of(device), torch.cuda.MemPool()
    found, where = Fences(fence_byte, inner_byte, pool=pool), torch.device("cuda", index)

    def take(size: int, byte: int) -> torch.Tensor:
        return torch.full((size,), byte, dtype=torch.uint8, device=where)

    with torch.cuda.use_mem_pool(pool, index):
        pieces = []
        for size in (Allocation(0, size).rounded for size in sizes if size > 0):
            # As wide as what it guards: an index that is wrong by all of it shows.
            least, most = (_LEAST_FENCE, SMALL) if size <= SMALL else (2 * SMALL, _MOST_FENCE)
            width = min(max(size, least), most)
            found.fences.append(take(width, fence_byte))
            pieces.append(take(size, inner_byte))
            found.fences.append(take(width, fence_byte))
        found.pieces = [Allocation(piece.data_ptr(), piece.numel()) for piece in pieces]
        torch.cuda.synchronize(index)
        del pieces
        yield found
        torch.cuda.synchronize(index)
