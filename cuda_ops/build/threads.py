"""Threads that build. Ctrl-C ends their compilers at once, and no build begins after it.

Standard library only, so that ``setup.py`` can use it before cuda_ops is installed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: How many seconds a compiler has to end by itself.
_PATIENCE = 1.0
#: Seconds until a thread that waits looks for Ctrl-C. The signal wakes a thread that waits, but not
#: one that is just about to: that one would notice nothing until what it waits for is done.
_LOOK = 0.5


class Submit(Protocol):
    """Starts a function in one of the threads."""

    def __call__(
        self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]: ...


class _Group:
    """The threads of one block of :func:`builders`."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.threads: list[threading.Thread] = []
        #: Where compilers of this group run.
        self.folders: set[Path] = set()


class _Thread(threading.local):
    group: _Group | None = None


_thread = _Thread()


@contextlib.contextmanager
def builders(count: int) -> Iterator[Submit]:
    """Lends threads that build. An exception in the block, such as Ctrl-C, ends what they do."""
    group = _Group()

    def join() -> None:
        _thread.group = group
        group.threads.append(threading.current_thread())

    with ThreadPoolExecutor(count, initializer=join) as pool:
        try:
            yield pool.submit
        except BaseException:
            _end(group, pool)
            raise


def completed(futures: Iterable[Future[_T]], seconds: float | None = None) -> Iterator[Future[_T]]:
    """Yields futures as they are done, as ``concurrent.futures.as_completed`` does, and lets Ctrl-C
    interrupt at any time.

    Raises:
        TimeoutError: the next one is not done ``seconds`` after the call.
    """
    waiting = {*futures}
    end = time.monotonic() + seconds if seconds is not None else None
    while waiting:
        left = _LOOK if end is None else max(0.0, min(_LOOK, end - time.monotonic()))
        done, waiting = wait(waiting, left, FIRST_COMPLETED)
        yield from done
        if not done and end is not None and time.monotonic() >= end:
            raise TimeoutError


def result(future: Future[_T]) -> _T:
    """Waits for a future's result; Ctrl-C interrupts at any time."""
    return next(completed([future])).result()


def stopped() -> bool:
    """Says whether the block that this thread works for is being left."""
    return _thread.group is not None and _thread.group.stopped.is_set()


@contextlib.contextmanager
def running_compilers(folder: Path) -> Iterator[None]:
    """Lets compilers run in a folder, for a thread of :func:`builders`.

    Raises:
        KeyboardInterrupt: they were ended, so that what they said is no error of the sources.
    """
    group = _thread.group or _Group()
    if group.stopped.is_set():
        raise KeyboardInterrupt
    group.folders.add(folder)
    try:
        yield
    except Exception as error:
        # The terminal sends Ctrl-C to ninja as well, which may be first: then no build may begin.
        if _was_interrupted(error):
            group.stopped.set()
        if group.stopped.is_set():
            raise KeyboardInterrupt from None
        raise
    finally:
        group.folders.discard(folder)


def _was_interrupted(error: Exception) -> bool:
    """Says whether Ctrl-C ended ninja, by its status, or its words where torch has caught them."""
    status = getattr(error.__cause__, "returncode", None)
    # Before it listens to Ctrl-C, the signal ends it.
    interrupted = status in (130, -signal.SIGINT)
    return interrupted or "ninja: build stopped: interrupted by user" in str(error)


def _end(group: _Group, pool: ThreadPoolExecutor) -> None:
    """Ends the builds of a group and waits for them; compilers that ignore it are killed."""
    found: dict[int, Path] = {}
    patient_until = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C would leave them running
            group.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for folder in tuple(group.folders):
                found |= dict.fromkeys(_compilers(folder), folder)
            found = {number: folder for number, folder in found.items() if _is_in(folder, number)}
            if not found and not any(thread.is_alive() for thread in group.threads):
                return
            ending = signal.SIGTERM if time.monotonic() < patient_until else signal.SIGKILL
            for number in found:
                with contextlib.suppress(OSError):
                    os.kill(number, ending)
            time.sleep(0.02)


def _compilers(folder: Path) -> Iterator[int]:
    """Lists the processes below this one that run in a folder: ninja and what it started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
    for process, parent in parents.items():
        while parent and parent != os.getpid():
            parent = parents.get(parent, 0)
        if parent and _is_in(folder, process):
            yield process


def _is_in(folder: Path, process: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{process}/cwd").samefile(folder)
    return False
