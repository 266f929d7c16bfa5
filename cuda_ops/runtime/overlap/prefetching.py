"""Batches that are on the GPU before they are asked for."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from cuda_ops.runtime.devices import resolved
from cuda_ops.runtime.overlap.staging import Pinned, stages
from cuda_ops.runtime.overlap.turns import (
    Event,
    Reader,
    Turn,
    Turns,
    check_count,
    check_iterable,
    join,
    start,
)
from cuda_ops.runtime.trees import map_tensors, tensors_of

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch], device: torch.device | str | int = "cuda", depth: int = 2
) -> Prefetch[Batch]:
    """Returns the loader's batches with their tensors on ``device``, copied ahead.

    A thread takes batches from the loader, copies what is not pinned into pinned memory that is
    used again, and starts the copy to the GPU on a stream of its own. The stream that is current
    where a batch is asked for waits for that batch and for nothing else, and the memory of a
    batch is not given to others while that stream may still read it. Use a batch on that stream,
    or make others wait for it.

    At most ``depth`` batches are on the GPU at once, the one in the loop's hands among them, if
    the loop keeps none; so with 1 nothing is copied ahead, and the host is never more than
    ``depth`` batches ahead of the GPU. An exception of the loader is raised where its batch would
    have come. A loop that ends early ends the thread. The result can be iterated again, with the
    same pinned memory, and has the length of the loader.

    A pinned tensor of the loader is copied from where it is, later: the loader must not write to
    it again, which ``torch.utils.data.DataLoader`` never does.

    Args:
        loader: any iterable. Its batches may be tensors, dicts, lists, tuples, dataclasses and
            packed sequences of them, nested; what is no tensor is passed on.
        device: where to; on a CPU the loader is iterated as it is, in the same thread.
        depth: how many batches, at least 1.

    Raises:
        TypeError: the loader is not iterable.
        ValueError: ``depth`` is less than 1, or a batch has a tensor that requires a gradient.

    Example:
        >>> batches = [(torch.ones(2), "a"), (torch.zeros(2), "b")]
        >>> for x, name in prefetch(batches, "cpu"):
        ...     print(name, x.sum().item())
        a 2.0
        b 0.0
    """
    check_iterable("prefetch", "loader", loader)
    check_count("prefetch", "depth", depth)
    return Prefetch(loader, resolved(device), depth)


class Prefetch(Generic[Batch]):
    """What :func:`prefetch` returns."""

    def __init__(self, loader: Iterable[Batch], device: torch.device, depth: int) -> None:
        self.loader, self.device, self.depth = loader, device, depth
        self._spare: list[Pinned] = []

    def __len__(self) -> int:
        # An iterable without a length raises TypeError, as len does of itself.
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        if self.device.type != "cuda":
            return _moved(self.loader, self.device)
        return self._iterate(_CudaLane(self.device))

    def _iterate(self, lane: Lane) -> Iterator[Batch]:
        slots = [
            _Slot(self._spare.pop() if self._spare else lane.pinned()) for _ in range(self.depth)
        ]
        run = _Run(self.loader, lane, slots)
        try:
            yield from run
        finally:
            if run.close():
                self._spare += [slot.pinned for slot in slots]


def _moved(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    for batch in loader:
        _check(batch)
        yield map_tensors(lambda tensor: tensor.to(device), batch)


def _check(batch: Any) -> None:
    for tensor in tensors_of(batch):
        if tensor.requires_grad:
            raise ValueError(
                "prefetch: a batch: expected tensors of data, got one of shape "
                f"{tuple(tensor.shape)} that requires a gradient, which would not come through "
                "the copy; detach it, or move it in the loop"
            )


class Lane(Protocol):
    """What moves batches; a test has one that delays each copy as long as it may."""

    def pinned(self) -> Pinned: ...

    def stage(self, batch: Any, pinned: Pinned) -> Any:
        """Returns the batch, pinned."""

    def send(self, batch: Any) -> tuple[Any, Event]:
        """Starts to copy a batch; the event is behind the copies."""

    def receive(self, batch: Any, ready: Event) -> None:
        """Makes the loop's stream wait for the copies of a batch."""

    def consumed(self) -> Event:
        """Returns an event behind what the loop's stream has to do so far."""


class _CudaLane(Reader):
    """A stream of its own, from pinned memory to a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def pinned(self) -> Pinned:
        return Pinned()

    def stage(self, batch: Any, pinned: Pinned) -> Any:
        for device in {one.device for one in tensors_of(batch) if one.is_cuda}:
            # The loader's own work on a GPU; without any, this would wait for the loop's.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad():
            return map_tensors(lambda one: pinned.put(one) if stages(one) else one, batch)

    def send(self, batch: Any) -> tuple[Any, Event]:
        with torch.cuda.stream(self._stream), torch.no_grad():
            moved = map_tensors(lambda one: one.to(self._device, non_blocking=True), batch)
            return moved, self._stream.record_event()


class _Sent(Turn):
    """A batch on its way."""

    def __init__(self, source: Any, ready: Event) -> None:
        super().__init__()
        #: What the copies read until ``ready``: pinned memory of the loader itself, for one.
        self.source: Any = source
        #: Behind the copies.
        self.ready = ready

    def wait_for_copies(self) -> None:
        """Waits until no copy reads the pinned memory of the batch."""
        self.ready.synchronize()
        self.source = None


@dataclass
class _Slot:
    """A place for one batch at a time."""

    pinned: Pinned
    sent: _Sent | None = None


class _Run:
    """One iteration: a thread that sends batches, and the loop that receives them."""

    def __init__(self, loader: Iterable[Any], lane: Lane, slots: list[_Slot]) -> None:
        self._loader, self._lane, self._slots = loader, lane, slots
        #: Boxes that hold a batch each, so that nothing else does once it is taken out; nothing
        #: was sent at the end, and then there is an exception, if it was one that ended it.
        self._queue: queue.SimpleQueue[tuple[list[Any], _Sent | None, BaseException | None]]
        self._queue = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = start(self._send_all, "prefetch")

    def _send_all(self) -> None:
        """Sends the loader's batches, in the thread."""
        error: BaseException | None = None
        batches: Any = None
        try:
            batches = iter(self._loader)
            for slot in itertools.cycle(self._slots):
                if not self._send(batches, slot):
                    break
        except BaseException as raised:
            error = raised
        try:
            if hasattr(batches, "close"):  # a generator, which has to end in its own thread
                batches.close()
        except BaseException as raised:
            error = raised
        self._queue.put(([], None, error))

    def _send(self, batches: Iterator[Any], slot: _Slot) -> bool:
        """Sends the next batch once the slot is free; False where there is none, or no loop."""
        for batch in batches:
            _check(batch)
            if slot.sent is not None:
                slot.sent.wait_for_copies()
            slot.pinned.clear()
            staged = self._lane.stage(batch, slot.pinned)
            if slot.sent is not None:
                slot.sent.wait()
            if self._ended.is_set():
                return False
            moved, ready = self._lane.send(staged)
            slot.sent = _Sent(staged, ready)
            self._queue.put(([moved], slot.sent, None))
            return True
        return False

    def __iter__(self) -> Iterator[Any]:
        turns = Turns(len(self._slots), self._lane.consumed)
        while True:
            turns.requested()
            box, sent, error = self._queue.get()
            if error is not None:
                raise error
            if sent is None:
                return
            self._lane.receive(box[0], sent.ready)
            turns.begin(sent, box[0])
            yield box.pop()

    def close(self) -> bool:
        """Ends the thread and waits for copies in flight; False if the loader does not let it."""
        self._ended.set()
        joined = join([self._thread], self._let_go, "prefetch: the loader")
        if joined:
            for slot in self._slots:
                if slot.sent is not None:
                    slot.sent.wait_for_copies()
        return joined

    def _let_go(self) -> None:
        for slot in self._slots:
            if slot.sent is not None:
                slot.sent.release(self._lane.consumed)
