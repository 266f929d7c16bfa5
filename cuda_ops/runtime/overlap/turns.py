"""What a loop and the threads that work ahead of it know of one item, from its start to its end."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cuda_ops.runtime.trees import parts_of, record_streams

#: Seconds that an iteration which ends early waits for its threads before it says so.
_PATIENCE = 10.0


class Event(Protocol):
    """A point of a stream, as ``torch.cuda.Event`` is."""

    def synchronize(self) -> None: ...


class Reader:
    """The loop's stream: the one that is current where it asks for an item."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def receive(self, ready: Any, shared: Any = None) -> Any:
        """Makes the stream wait for an item, and returns the stream.

        Args:
            ready: behind the work that makes the item.
            shared: a tree of tensors in memory of other streams, which is not theirs again until
                the stream that is returned has done with it.
        """
        reader = torch.cuda.current_stream(self._device)
        reader.wait_event(ready)
        if shared is not None:
            record_streams(shared, reader)
        return reader


class Turn:
    """The time in which an item takes up memory on a GPU: until the loop has let go of it.

    The loop has let go once the memory itself ends, which may be later than the tensors that it
    got: a view of them, or a graph of autograd, may be what holds it.
    """

    def __init__(self) -> None:
        #: The stream that reads the item, from when the loop has it.
        self.reader: Any = None
        self._over, self._asked = False, False
        #: Gets something at the end. Unlike an event's, its call may come from a collection in the
        #: midst of another one in the same thread.
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._left: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._memory: list[StorageWeakRef] = []

    def release(self) -> None:
        """Ends the turn, whatever the loop still holds."""
        self._asked = True
        self._left = {}
        self._end()

    def release_after(self, memory: Sequence[torch.UntypedStorage]) -> None:
        """Ends the turn as soon as all of the memory does; without any, it waits for a request."""

        def ended(one: weakref.ref[torch.UntypedStorage]) -> None:
            # Any thread may come here, even two at once; then both may end the turn.
            if self._left.pop(id(one), None) is not None and not self._left:
                self._end()

        self._memory = [StorageWeakRef(one) for one in memory]
        references = [weakref.ref(one, ended) for one in memory]
        self._left = {id(one): one for one in references}

    def _end(self) -> None:
        if not self._over:
            self.ending()
            self._over = True
            self._ends.put(None)

    def ending(self) -> None:
        """Called at the end, before :meth:`wait` returns; maybe twice."""

    def wait(self) -> None:
        """Waits until the loop has let go of the item; its stream may have much to do yet."""
        while not self._over:
            self._ends.get()
        # What is called at the end of memory is called just before the memory is free.
        while not self._asked and not all(one.expired() for one in self._memory):
            time.sleep(1e-4)


class Turns:
    """The turns of one loop, of which all but the last have to end when it asks for more.

    The loop's variable holds an item until the next one takes its place, so the turn of the last
    ends by :meth:`Turn.release_after`, or at the next request; but if there is room for one item
    alone, there is no next one before its end.
    """

    def __init__(self, room: int) -> None:
        self._kept = min(1, room - 1)
        self._open: list[Turn] = []

    def requested(self) -> None:
        """Ends what has to end before the next item."""
        ending = max(0, len(self._open) - self._kept)
        for turn in self._open[:ending]:
            turn.release()
        del self._open[:ending]

    def begin(self, turn: Turn) -> None:
        """Notes that the loop gets an item."""
        self._open.append(turn)


def memory_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Returns the memory that tensors are in, of sparse ones and wrappers that of their parts."""
    found: list[torch.UntypedStorage] = []
    for tensor in tensors:
        wrapper: Any = tensor
        if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(wrapper):
            inner = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
            found += memory_of(one for one in inner if isinstance(one, torch.Tensor))
        else:
            found += [part.untyped_storage() for part in parts_of(tensor)]
    return found


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
