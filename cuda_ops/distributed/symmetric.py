"""Rows that ranks of one host write straight into each other's memory: torch's symmetric memory.

The copies are those of the GPU's copy engines, which leave its processors to the products, and the
host waits for nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem

from cuda_ops.distributed.agreement import Agreement, agreement_of

#: Set to 0, ranks send by NCCL alone.
SWITCH = "CUDA_OPS_SYMMETRIC_MEMORY"
#: What parts of a box begin at, and what its size is a multiple of.
_ALIGNMENT, _STEP = 512, 2 << 20
#: Bytes of a part up to which one launch of the SMs is quicker than copies one by one.
_SMALL = 512 << 10
#: Places in boxes that are kept, as torch takes long to make a tensor of one.
_MOST_PLACES = 256


@dataclass
class _Box:
    """Memory that each rank has as much of, which all write to."""

    memory: torch.Tensor
    handle: Any

    @property
    def bytes(self) -> int:
        return self.memory.numel()

    def view(
        self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        found: torch.Tensor = self.handle.get_buffer(rank, shape, dtype, offset // dtype.itemsize)
        return found


class Memory:
    """What the ranks of a group share: a box for what all send to all, and one for the way back.

    Ranks take turns: all gather, then all send back.
    """

    def __init__(self, group: Any, device: torch.device, seconds: float) -> None:
        # Not the group itself, which the table below would then keep for ever.
        self._name, self.rank, self.size = group.group_name, group.rank(), group.size()
        self.device, self._timeout = device, int(seconds * 1000)
        self._boxes: dict[str, _Box] = {}
        self._places: dict[Any, Any] = {}
        #: Boxes that a graph writes to, which stay as long as this.
        self._captured: list[_Box] = []
        #: How much of a box the chunks of this turn take up so far.
        self._used = 0
        self._aside = torch.cuda.Stream(device)
        self._last: torch.cuda.Stream | None = None

    def fits(self, **wanted: int) -> bool:
        """Returns whether boxes have so many bytes: ``gathered`` and ``returned``."""
        return all(
            name in self._boxes and count <= self._boxes[name].bytes
            for name, count in wanted.items()
        )

    def grow(self, agree: Callable[[], Any], **wanted: int) -> None:
        """Makes boxes that large, at all ranks together, who ``agree``; not within a capture."""
        torch.cuda.synchronize(self.device)
        agree()  # from here on no rank writes to the old ones
        self._places.clear()
        # torch makes multicast memory too, which nothing here uses and some machines do not have.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        for name, count in wanted.items():
            before = self._boxes.pop(name, None)
            count = -(-max(count, before.bytes if before else 0) // _STEP) * _STEP
            made = symm_mem.empty(count, dtype=torch.uint8, device=self.device)
            self._boxes[name] = _Box(made, symm_mem.rendezvous(made, self._name))

    def begin_all_gather(
        self, parts: Sequence[torch.Tensor], most: int, chunk: int = 0, aside: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        """Begins to send rows to all; returns what waits for those of all ranks, ``most`` rows of
        each, one after the other. What a rank has less of is not written.

        Args:
            parts: of ``most`` rows at most; those of a part have one shape and dtype at all ranks.
            most: for how many rows of each rank there is room.
            chunk: which of this turn; the first, 0, begins it.
            aside: whether on a stream of its own, beside what the current one does until the wait.
        """
        return self._begin("gathered", parts, most, 1, chunk, aside)

    def begin_all_to_all(
        self, parts: Sequence[torch.Tensor], chunk: int = 0, aside: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        """Begins to send each rank its share of the rows, all of one size; returns what waits for
        what this rank gets of all, one after the other. Each gather has one, if of nothing.
        """
        each = parts[0].shape[0] // self.size if parts else 0
        return self._begin("returned", parts, each, self.size, chunk, aside)

    def _begin(
        self, turn: str, parts: Sequence[torch.Tensor], each: int, shares: int, chunk: int,
        aside: bool,
    ) -> Callable[[], list[torch.Tensor]]:  # fmt: skip
        """Copies each part, or its share for a rank, to the place of this rank at each one, which
        has room for ``each`` rows.
        """
        box, current = self._boxes[turn], torch.cuda.current_stream(self.device)
        stream = self._aside if aside else current
        self._follow(stream, current, box)
        with torch.cuda.stream(stream) if aside else contextlib.nullcontext():
            here = self._copy(box, turn, parts, each, shares, chunk)
            # A rank that sends back has read what it got before, and one that sends again has read
            # what came back: so none is needed in front of the copies.
            box.handle.barrier(channel=0, timeout_ms=self._timeout)
            done = stream.record_event() if aside else None

        def wait() -> list[torch.Tensor]:
            if done is not None:
                torch.cuda.current_stream(self.device).wait_event(done)
            return here if parts else []  # and what is sent stays until here

        return wait

    def _follow(self, stream: Any, current: Any, box: _Box) -> None:
        """Puts a stream behind the current one, and behind the one that sent last."""
        if stream is not current:
            stream.wait_stream(current)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(box)
        else:
            if self._last is not None and self._last != stream:
                stream.wait_stream(self._last)
            self._last = stream

    def _copy(
        self, box: _Box, turn: str, parts: Sequence[torch.Tensor], each: int, shares: int,
        chunk: int,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Starts the copies, and returns where this rank gets the same of all."""
        here: list[torch.Tensor] = []
        if not parts:
            return here
        start = self._used if chunk else 0
        words = all(map(_is_small, parts))
        key = turn, start, each, words, *[(part.shape, part.dtype) for part in parts]
        if key not in self._places:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[key] = self._placed(box, start, parts, each, shares, words)
        here, there, self._used = self._places[key]
        if words:  # in one launch, as the host takes longer for each than the GPU
            parts = [part.view(torch.int32) for part in parts]
        if shares == 1:
            sent = [*parts] * self.size
        else:
            split = [part.view(shares, each, *part.shape[1:]).unbind() for part in parts]
            sent = [share[rank] for rank in self._order() for share in split]
        if words:
            torch._foreach_copy_(there, sent)
        else:
            for place, one in zip(there, sent, strict=True):
                place.copy_(one, non_blocking=True)
        return here

    def _placed(
        self, box: _Box, start: int, parts: Sequence[torch.Tensor], each: int, shares: int,
        words: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:  # fmt: skip
        """Returns tensors here for what all ranks send, those of this rank at each one, and the end
        of them in the box.
        """
        shapes = [(self.size * each, *part.shape[1:]) for part in parts]
        offsets = [start]
        for shape, part in zip(shapes, parts, strict=True):
            offsets.append(offsets[-1] + room(shape, part.dtype))
        views = [
            [
                box.view(rank, at, shape, part.dtype)
                for at, shape, part in zip(offsets, shapes, parts, strict=False)
            ]
            for rank in range(self.size)
        ]
        there = [
            view[self.rank * each :][: part.shape[0] // shares]
            for rank in self._order()
            for view, part in zip(views[rank], parts, strict=True)
        ]
        if words:
            there = [place.view(torch.int32) for place in there]
        return views[self.rank], there, offsets[-1]

    def _order(self) -> list[int]:
        """Returns the ranks in an order in which no two send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size + 1)]


def _is_small(part: torch.Tensor) -> bool:
    """Returns whether a part is copied by words of 4 bytes, with others in one launch."""
    return (
        part.nbytes <= _SMALL and part.is_contiguous() and part.shape[-1] * part.itemsize % 4 == 0
    )


def room(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns bytes that a tensor takes up in a box."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


_memories: weakref.WeakKeyDictionary[Any, Memory | None] = weakref.WeakKeyDictionary()


def memory_of(group: Any, device: torch.device) -> Memory | None:
    """Returns the memory that a group's ranks share; ``None`` where they cannot: on several hosts
    or a CPU, with one GPU for two ranks, with GPUs that do not reach each other, or by
    :data:`SWITCH`. All of them make the first call together.
    """
    if group not in _memories:
        agreement = agreement_of(group)
        could = _could_share(agreement, device)
        _memories[group] = Memory(group, device, agreement.seconds) if could else None
    return _memories[group]


def is_elsewhere(group: Any, device: torch.device) -> bool:
    """Returns whether the memory that a group shares is another device's."""
    found = _memories.get(group)
    return found is not None and found.device != device


def _could_share(agreement: Agreement, device: torch.device) -> bool:
    uuid, allowed = "", os.environ.get(SWITCH, "1") != "0"
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    all_of = agreement.gather((uuid, allowed))
    uuids = [one for one, _ in all_of]
    if not (agreement.one_host and all(may for _, may in all_of) and all(uuids)):
        return False
    reached = len(set(uuids)) == len(uuids) and _reaches(device, uuids)
    return all(agreement.gather(reached))


def _reaches(device: torch.device, uuids: Sequence[str]) -> bool:
    """Returns whether a GPU can write to all of these, which this process must see for that."""
    seen = {
        str(torch.cuda.get_device_properties(k).uuid): k for k in range(torch.cuda.device_count())
    }
    return all(
        uuid in seen
        and (seen[uuid] == device.index or torch.cuda.can_device_access_peer(device, seen[uuid]))
        for uuid in uuids
    )
