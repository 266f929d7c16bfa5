"""Batches that are on the GPU before they are asked for."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from cuda_ops.runtime.arguments import check_count, check_iterable
from cuda_ops.runtime.devices import checked_device
from cuda_ops.runtime.overlap.lanes import CudaLane, Lane
from cuda_ops.runtime.overlap.staging import Pinned
from cuda_ops.runtime.overlap.turns import (
    Event,
    Turn,
    Turns,
    join,
    memory_of,
    start,
)
from cuda_ops.runtime.trees import map_tensors, tensors_of

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch], device: torch.device | str | int | None = None, depth: int = 2
) -> Prefetch[Batch]:
    """Returns the loader's batches with their tensors on ``device``, copied ahead.

    A thread takes batches from the loader, copies what is not pinned into pinned memory that is
    used again, and starts the copy to the GPU on a stream of its own. The stream that is current
    where a batch is asked for waits for that batch and for nothing else. The memory of a batch
    ends with the last tensor that holds it, a view for one, and is used again behind what that
    stream has to do by then. Use a batch on that stream, or make others wait for it and call
    ``record_stream`` for them.

    At most ``depth`` batches are on the GPU at once, the one in the loop's hands among them, if
    the loop keeps none; so with 1 nothing is copied ahead. The host does not wait until the GPU
    has done with a batch, only until the batch ``depth`` before the one it asks for is there. An
    exception of the loader is raised where its batch would have come. A loop that ends early ends
    the thread. The result can be iterated again, with the same pinned memory, and has the length
    of the loader.

    A pinned tensor of the loader is copied from where it is, later: the loader must not write to
    it again, which ``torch.utils.data.DataLoader`` never does.

    Args:
        loader: any iterable. Its batches may be tensors, dicts, lists, tuples, dataclasses and
            packed sequences of them, nested; what is no tensor is passed on.
        device: where to; by default the current GPU, or the CPU where there is none. On a CPU the
            loader is iterated as it is, in the same thread.
        depth: how many batches, at least 1.

    Raises:
        TypeError: the loader is not iterable.
        ValueError: ``depth`` is no int of 1 or more, ``device`` is neither a CPU nor a GPU of this
            machine, or a batch has a tensor that requires a gradient or a container that holds
            itself.

    Example:
        >>> batches = [(torch.ones(2), "a"), (torch.zeros(2), "b")]
        >>> for x, name in prefetch(batches, "cpu"):
        ...     print(name, x.sum().item())
        a 2.0
        b 0.0
    """
    check_iterable("prefetch", "loader", loader)
    check_count("prefetch", "depth", depth)
    return Prefetch(loader, checked_device("prefetch", device), depth)


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
        return self._iterate(CudaLane(self.device))

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
                lane.close()


def _moved(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    for batch in loader:
        _check(batch)
        yield map_tensors(lambda tensor: tensor.to(device), batch)


def _check(batch: Any) -> None:
    try:
        tensors = tensors_of(batch)
    except RecursionError:
        raise ValueError(
            "prefetch: a batch: expected containers with an end, got one that holds itself or is "
            "nested too deep"
        ) from None
    for tensor in tensors:
        if tensor.requires_grad:
            raise ValueError(
                "prefetch: a batch: expected tensors of data, got one of shape "
                f"{tuple(tensor.shape)} that requires a gradient, which would not come through "
                "the copy; detach it, or move it in the loop"
            )


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


def _follow_at_the_end(memory: torch.UntypedStorage, lane: Lane, sent: _Sent) -> None:
    """Makes copies wait for the loop's stream when memory ends, so that it is used again behind.

    The allocator gives memory back to the stream that copies, at once and without a look at other
    streams; torch calls this just before. The host waits for nothing, and the next batch finds the
    memory free, which ``record_stream`` would keep until the host had seen an event pass. It holds
    for whatever ends the memory, a tensor, a view or autograd, in any thread and after the turn
    too, but not for ``resize_``, which takes memory from under its tensors.
    """

    def follow() -> None:
        if sent.reader is not None:
            lane.follow(sent.reader)

    weakref.finalize(memory, follow).atexit = False


@dataclass
class _Slot:
    """A place for one batch at a time."""

    pinned: Pinned
    sent: _Sent | None = None


class _Run:
    """One iteration: a thread that sends batches, and the loop that receives them."""

    def __init__(self, loader: Iterable[Any], lane: Lane, slots: list[_Slot]) -> None:
        self._loader, self._lane, self._slots = loader, lane, slots
        #: Boxes that hold a batch each, and then what of it was on the GPU, so that nothing else
        #: does once it is taken out; nothing was sent at the end, and then there is an exception,
        #: if it was one that ended it.
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
            moved = self._lane.send(staged)
            slot.sent = sent = _Sent(staged, moved.ready)
            memory = memory_of(moved.copies)
            for one in memory:
                _follow_at_the_end(one, self._lane, sent)
            sent.release_after(memory + memory_of(moved.found))
            self._queue.put(([moved.tree, *moved.found], sent, None))
            return True
        return False

    def __iter__(self) -> Iterator[Any]:
        turns, reader = Turns(len(self._slots)), None
        while True:
            if reader is not None and len(self._slots) == 1:
                self._lane.follow(reader)  # nothing is copied ahead, though the host is
            turns.requested()
            box, sent, error = self._queue.get()
            if error is not None:
                raise error
            if sent is None:
                return
            sent.reader = reader = self._lane.receive(sent.ready, box[1:] or None)
            turns.begin(sent)
            del box[1:]
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
                slot.sent.release()
