"""Rows that ranks of one host write straight into each other's memory: torch's symmetric memory.

Many rows go by the GPU's copy engines, which leave its processors to products, others by a kernel.
The host waits for nothing.
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
from cuda_ops.distributed.collectives import Wait

#: Set to 0, ranks send by NCCL alone.
SWITCH = "CUDA_OPS_SYMMETRIC_MEMORY"
#: What parts of a box begin at, and what its size is a multiple of.
_ALIGNMENT, _STEP = 512, 2 << 20
#: Bytes that one kernel copies to all ranks: to start a copy for each takes the host longer.
_SMALL = 8 << 20
#: How many tensors in boxes are kept, as torch takes long to make one.
_MOST_KNOWN = 256
#: The turns, which have a box each.
GATHERED, RETURNED = "gathered", "returned"

Shaped = tuple[Sequence[int], torch.dtype]


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
        self._known: dict[Any, Any] = {}
        #: What callers keep for as long as the boxes are these.
        self._kept: dict[Any, Any] = {}
        #: Boxes that a graph writes to, which stay as long as this.
        self._captured: dict[int, _Box] = {}
        #: How much of a box the chunks of this turn take up so far.
        self._used = 0
        self._aside = torch.cuda.Stream(device)
        #: The stream that sent last, and its handle.
        self._last_stream: torch.cuda.Stream | None = None
        self._last: int | None = None

    @property
    def order(self) -> list[int]:
        """The ranks from the next one to this one, so that no two send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size + 1)]

    def fits(self, **wanted: int) -> bool:
        """Returns whether boxes have so many bytes: ``gathered`` and ``returned``."""
        return all(count <= self._bytes_of(name) for name, count in wanted.items())

    def grow(self, agreement: Agreement, op: str, **wanted: int) -> None:
        """Makes boxes that large, by all ranks of an agreement together; not within a capture.

        Raises:
            RuntimeError: at all ranks: one of them has no memory left.
        """
        torch.cuda.synchronize(self.device)
        agreement.exchange(op, ())  # from here on no rank writes to the old ones
        sizes = {name: max(count, self._bytes_of(name) * 5 // 4) for name, count in wanted.items()}
        self._boxes.clear()
        self._known.clear()
        self._kept.clear()
        # Not of torch's allocator, which would keep what this needs.
        torch.cuda.empty_cache()
        # torch makes multicast memory too, which nothing here uses and some machines do not have.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        made, refusal = {}, ""
        try:
            for name, count in sizes.items():
                count = -(-count // _STEP) * _STEP
                made[name] = symm_mem.empty(count, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            refusal = f"no memory for what ranks share: {error}"
        agreement.exchange(op, (), refusal)
        for name, box in made.items():
            self._boxes[name] = _Box(box, symm_mem.rendezvous(box, self._name))

    def _bytes_of(self, name: str) -> int:
        return self._boxes[name].bytes if name in self._boxes else 0

    def kept(self, key: Any) -> Any:
        """Returns what was kept under a key since the boxes are these; else ``None``."""
        return self._kept.get(key)

    def keep(self, key: Any, value: Any) -> None:
        """Keeps something until boxes grow, or much else is kept. It must not hold this memory."""
        if len(self._kept) >= _MOST_KNOWN:
            self._kept.clear()
        self._kept[key] = value

    def begin_all_gather(
        self, parts: Sequence[torch.Tensor], most: int, chunk: int = 0, aside: bool = False
    ) -> Wait:
        """Begins to send rows to all; returns what waits for those of all ranks, ``most`` rows of
        each, one after the other. What a rank has less of is not written.

        Args:
            parts: of ``most`` rows at most; those of a part have one shape and dtype at all ranks.
            most: for how many rows of each rank there is room.
            chunk: which of this turn; the first, 0, begins it.
            aside: whether on a stream of its own, beside what the current one does until the wait.
        """
        shaped = [((self.size * most, *part.shape[1:]), part.dtype) for part in parts]
        return self._begin(GATHERED, parts, shaped, most, chunk, aside)

    def begin_all_to_all(
        self, parts: Sequence[torch.Tensor], chunk: int = 0, aside: bool = False
    ) -> Wait:
        """Begins to send each rank its share of the rows, all of one size; returns what waits for
        what this rank gets of all, one after the other. Each gather has one, if of nothing.
        """
        shaped = [(tuple(part.shape), part.dtype) for part in parts]
        each = parts[0].shape[0] // self.size if parts else 0
        return self._begin(RETURNED, parts, shaped, each, chunk, aside)

    def places(
        self, turn: str, shaped: Sequence[Shaped], each: int
    ) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        """Returns where a kernel of the current stream may write rows of this rank, ``each`` at
        every rank, and where the rows of all ranks lie here once :meth:`begin_barrier` is over.
        """
        self.follow(turn)
        return self._places_of(turn, shaped, each, 0)

    def begin_barrier(self, turn: str, aside: bool = False) -> Callable[[], None]:
        """Begins to tell all ranks that this one has written; returns what waits for all of them.

        A rank that sends back has read what it got before, and one that sends again has read what
        came back: so no other barrier is needed.
        """
        if not aside:
            self._boxes[turn].handle.barrier(channel=0, timeout_ms=self._timeout)
            return lambda: None
        with torch.cuda.stream(self._aside):
            self._boxes[turn].handle.barrier(channel=0, timeout_ms=self._timeout)
            done = self._aside.record_event()

        def wait() -> None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            if not torch.cuda.is_current_stream_capturing():  # it reads what has come
                self._last, self._last_stream = current.cuda_stream, current

        return wait

    def _begin(
        self, turn: str, parts: Sequence[torch.Tensor], shaped: Sequence[Shaped], each: int,
        chunk: int, aside: bool,
    ) -> Wait:  # fmt: skip
        """Copies each part, or where it has rows for all ranks its share, to this rank's places."""
        self.follow(turn, self._aside if aside else None)
        there, here = self._places_of(turn, shaped, each, chunk)
        with torch.cuda.stream(self._aside) if aside else contextlib.nullcontext():
            for k, part in enumerate(parts):
                rows = [
                    part[rank * each : (rank + 1) * each] if turn == RETURNED else part
                    for rank in self.order
                ]
                places = [
                    there[rank][k] if own.shape[0] == each else there[rank][k][: own.shape[0]]
                    for rank, own in zip(self.order, rows, strict=True)
                ]
                if part.nbytes <= _SMALL:
                    torch._foreach_copy_(places, rows)
                else:
                    for place, own in zip(places, rows, strict=True):
                        place.copy_(own, non_blocking=True)
        over = self.begin_barrier(turn, aside)

        def wait() -> list[torch.Tensor]:
            over()
            return here if parts else []  # and what is sent stays until here

        return wait

    def follow(self, turn: str, stream: torch.cuda.Stream | None = None) -> None:
        """Makes a stream, or else the current one, wait for the current one and for the last that
        sent. Call it before you write to what :meth:`places` returned in an earlier call.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        # A number, as it is asked twice a call: torch's object of a stream costs far more.
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream is None and handle == self._last and not capturing:
            return
        current = torch.cuda.current_stream(self.device)
        if stream is not None:
            stream.wait_stream(current)
        if capturing:
            self._captured[id(self._boxes[turn])] = self._boxes[turn]
            return
        sends = stream or current
        if self._last_stream is not None and self._last_stream != sends:
            sends.wait_stream(self._last_stream)
        self._last, self._last_stream = sends.cuda_stream, sends

    def _places_of(
        self, turn: str, shaped: Sequence[Shaped], each: int, chunk: int
    ) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        start = self._used if chunk else 0
        key = turn, start, each, *shaped
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            offsets = [start]
            for shape, dtype in shaped:
                offsets.append(offsets[-1] + room(shape, dtype))
            box, own = self._boxes[turn], slice(self.rank * each, (self.rank + 1) * each)
            with torch.inference_mode(False):  # or later calls could not write to them
                views = [
                    [box.view(rank, at, *one) for at, one in zip(offsets, shaped, strict=False)]
                    for rank in range(self.size)
                ]
                there = [[view[own] for view in of_rank] for of_rank in views]
            self._known[key] = there, views[self.rank], offsets[-1]
        there, here, self._used = self._known[key]
        return there, here


def room(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns bytes that a tensor takes up in a box."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


_memories: weakref.WeakKeyDictionary[Any, Memory | None] = weakref.WeakKeyDictionary()
_UNKNOWN: Any = object()


def memory_of(group: Any, device: torch.device) -> Memory | None:
    """Returns the memory that a group's ranks share; ``None`` where they cannot: on several hosts
    or a CPU, with one GPU for two ranks, with GPUs that do not reach each other, or by
    :data:`SWITCH`. All of them make the first call together.
    """
    found: Memory | None = _memories.get(group, _UNKNOWN)
    if found is _UNKNOWN:
        agreement = agreement_of(group)
        could = _could_share(agreement, device)
        found = Memory(group, device, agreement.seconds) if could else None
        _memories[group] = found
    return found


def is_elsewhere(group: Any, device: torch.device) -> bool:
    """Returns whether the memory that a group shares is another device's."""
    found = _memories.get(group)
    return found is not None and found.device != device


def _could_share(agreement: Agreement, device: torch.device) -> bool:
    uuid, allowed = "", os.environ.get(SWITCH, "1") != "0"
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        allowed = allowed and symm_mem.get_backend(device) == "CUDA"  # others are not for copies
    all_of = agreement.gather((uuid, device.index, allowed))
    uuids = [uuid for uuid, *_ in all_of]
    if not (agreement.one_host and all(may for *_, may in all_of) and all(uuids)):
        return False
    # torch wants other numbers for other GPUs too, which each process may count in its own way.
    numbers = {(uuid, index) for uuid, index, _ in all_of}
    apart = all(len({one[k] for one in numbers}) == len(all_of) for k in range(2))
    return all(agreement.gather(apart and _reaches(device, uuids)))


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
