"""What a loop and the threads that work ahead of it know of one item, from its start to its end."""

from __future__ import annotations

import contextvars
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cuda_ops.runtime.trees import record_streams, tensors_of

#: Seconds that an iteration which ends early waits for its threads before it says so.
_PATIENCE = 10.0


class Event(Protocol):
    """A point of a stream, as ``torch.cuda.Event`` is."""

    def synchronize(self) -> None: ...


class Reader:
    """The loop's stream: the one that is current where it asks for an item."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reader = torch.cuda.current_stream(device)

    def receive(self, item: Any, ready: Any) -> None:
        """Makes the stream wait for an item, whose memory belongs to another one."""
        self._reader = torch.cuda.current_stream(self._device)
        self._reader.wait_event(ready)
        record_streams(item, self._reader)

    def consumed(self) -> Event:
        """Returns an event behind what the stream has to do so far."""
        event: Event = self._reader.record_event()
        return event


class Turn:
    """The time in which an item takes up memory on a GPU: until the loop has done with it."""

    def __init__(self) -> None:
        self._consumed: Event | None = None
        self._released, self._asked = threading.Event(), False
        self._lock = threading.RLock()  # a collection inside may end the same turn
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._memory: list[StorageWeakRef] = []

    def release(self, record: Callable[[], Event | None]) -> None:
        """Ends the turn, whatever the loop still holds.

        Args:
            record: returns an event behind what the loop has to do on a GPU so far.
        """
        self._asked = True
        self._end(record)

    def release_after(self, item: Any, record: Callable[[], Event | None]) -> None:
        """Ends the turn as soon as the loop has let go of all tensors of the item."""

        def ended(_: weakref.ref[torch.Tensor]) -> None:
            if all(one() is None for one in self._tensors):
                self._end(record)

        found = tensors_of(item)
        self._memory = [
            StorageWeakRef(one.untyped_storage()) for one in found if one.layout == torch.strided
        ]
        self._tensors = [weakref.ref(one, ended) for one in found]

    def _end(self, record: Callable[[], Event | None]) -> None:
        with self._lock:
            if not self._released.is_set():
                self._consumed = record()
                self._released.set()

    def wait(self) -> None:
        """Waits until the loop has let go of the item, and its stream has done with it."""
        self._released.wait()
        # A tensor says that it ends before its memory is free, and a view may outlive it.
        while not self._asked and not all(one.expired() for one in self._memory):
            time.sleep(1e-4)
        if self._consumed is not None:
            self._consumed.synchronize()


class Turns:
    """The turns of one loop, of which all but the last have to end when it asks for more.

    The loop's variable holds an item until the next one takes its place, so the turn of the last
    ends by :meth:`Turn.release_after`, or at the next request; but if there is room for one item
    alone, there is no next one before its end.
    """

    def __init__(self, room: int, record: Callable[[], Event | None]) -> None:
        self._kept, self._record = min(1, room - 1), record
        self._open: list[Turn] = []

    def requested(self) -> None:
        """Ends what has to end before the next item."""
        ending = len(self._open) - self._kept
        for turn in self._open[: max(0, ending)]:
            turn.release(self._record)
        self._open = self._open[max(0, ending) :]

    def begin(self, turn: Turn, item: Any) -> None:
        """Notes what the loop gets."""
        turn.release_after(item, self._record)
        self._open.append(turn)


def check_count(function: str, argument: str, given: object) -> None:
    """Raises ValueError unless an argument is an int of 1 or more."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(
            f"{function}: argument '{argument}': expected an int of 1 or more, got {given!r}"
        )


def check_iterable(function: str, argument: str, given: object) -> None:
    """Raises TypeError unless ``iter`` takes an argument."""
    if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        raise TypeError(
            f"{function}: argument '{argument}': expected an iterable, got {type(given).__name__}"
        )


def start(work: Callable[[], None], name: str) -> threading.Thread:
    """Starts a thread with the context variables and the gradient mode of this one."""
    context, grad = contextvars.copy_context(), torch.is_grad_enabled()

    def run() -> None:
        with torch.set_grad_enabled(grad):
            work()

    thread = threading.Thread(target=lambda: context.run(run), name=f"cuda_ops.{name}", daemon=True)
    thread.start()
    return thread


def join(threads: Iterable[threading.Thread], let_go: Callable[[], None], what: str) -> bool:
    """Waits for threads that may wait for what ``let_go`` ends; warns and returns False if one of
    them does not come back, from a call of the user's that it is in.
    """
    until = time.monotonic() + _PATIENCE
    for thread in threads:
        while thread.is_alive() and time.monotonic() < until:
            let_go()
            thread.join(0.01)
        if thread.is_alive():
            warnings.warn(
                f"{what} has not come back for {_PATIENCE:g} s after the loop had ended; its "
                "thread ends as soon as it does",
                RuntimeWarning,
                stacklevel=4,
            )
            return False
    let_go()
    return True
