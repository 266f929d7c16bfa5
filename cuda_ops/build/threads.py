"""Threads that build. Ctrl-C ends their compilers at once, and no build begins after it.

Standard library only, so that ``setup.py`` can use it before cuda_ops is installed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: How many seconds a compiler has to end by itself.
_PATIENCE = 1.0


class Submit(Protocol):
    """Starts a function in one of the threads."""

    def __call__(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]: ...


class _Group:
    """The threads of one block of :func:`builders`."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        #: Where compilers of this group run.
        self.folders: set[Path] = set()


class _Thread(threading.local):
    group: _Group | None = None


_thread = _Thread()


@contextlib.contextmanager
def builders(count: int) -> Iterator[Submit]:
    """Lends threads that build. An exception in the block, such as Ctrl-C, ends what they do."""
    group = _Group()
    futures: list[Future[object]] = []

    def submit(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future = pool.submit(function, *args, **kwargs)
        futures.append(future)  # type: ignore[arg-type]  # only asked whether it is done
        return future

    def join() -> None:
        _thread.group = group

    with ThreadPoolExecutor(count, initializer=join) as pool:
        try:
            yield submit
        except BaseException:
            _end(group, futures)
            raise


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


def _end(group: _Group, futures: list[Future[object]]) -> None:
    """Ends the builds of a group and waits for them; compilers that ignore it are killed."""
    found: dict[int, Path] = {}
    patient_until = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C would leave them running
            group.stopped.set()
            for future in futures:
                future.cancel()
            for folder in tuple(group.folders):
                found |= dict.fromkeys(_compilers(folder), folder)
            found = {number: folder for number, folder in found.items() if _is_in(folder, number)}
            if not found and all(future.done() for future in futures):
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
