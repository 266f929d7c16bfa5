"""Names for parts of a program, and how much memory each takes.

Numbers of a GPU are those of torch's allocator for the whole device, since it counts by device and
not by thread: what other threads allocate meanwhile counts in a region too.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cuda_ops.runtime.devices import checked_device


@dataclass
class RegionUse:
    """What the runs of one region took, in bytes; ``None`` for what cannot be known."""

    #: Its name behind those of the regions around it: ``"step/forward"``.
    name: str
    device: str
    runs: int = 0
    #: All that was allocated inside, freed again or not. Unknown on a CPU.
    allocated: int | None = None
    #: How much more was in use after than before, all runs together. Negative where a region frees
    #: what was there before.
    left: int = 0
    #: The most that was in use at once beyond what was there before, of the run with most. Unknown
    #: on a CPU unless the process has never been larger.
    peak: int | None = None


@dataclass
class _Active:
    """A region that runs now."""

    use: RegionUse
    before: dict[str, int]
    highest: int


@dataclass
class _Books:
    """What is known of all regions; ``lock`` protects it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    uses: dict[tuple[str, str], RegionUse] = field(default_factory=dict)
    active: list[_Active] = field(default_factory=list)
    #: torch's peaks from before a region forgot them, by device.
    peaks: dict[str, int] = field(default_factory=dict)


_BOOKS = _Books()


class _Thread(threading.local):
    """The names of the regions that this thread is in, from the outside."""

    def __init__(self) -> None:
        self.names: list[str] = []


_THREAD = _Thread()


@contextlib.contextmanager
def region(name: str, device: torch.device | str | None = None) -> Iterator[RegionUse]:
    """Counts what the block allocates under a name, for :func:`memory_report` and to be read here.

    Regions may be nested, also one in itself; a thread has regions of its own. On a GPU a region
    resets torch's peak statistics at both ends (``torch.cuda.max_memory_allocated``);
    :func:`memory_report` still knows the peak of all. On a CPU the numbers are those of the whole
    process: the C library's heap, and its largest resident set.

    >>> with region("inputs", "cpu") as inputs:
    ...     x = torch.ones(1 << 20)
    >>> inputs.name, inputs.runs, inputs.left >= 4 << 20
    ('inputs', 1, True)

    Args:
        name: what to call it; ``/`` stands between names of nested regions.
        device: a CPU or CUDA device; by default the current GPU, or the CPU where there is none.

    Raises:
        TypeError: ``name`` is no text.
        ValueError: ``name`` is empty, or ``device`` is neither a CPU nor a GPU of this machine.
    """
    if not isinstance(name, str):
        raise TypeError(f"region: argument 'name': expected some text, got {type(name).__name__}")
    if not name:
        raise ValueError("region: argument 'name': expected some text, got ''")
    where = counted_device("region", device)
    _THREAD.names.append(name)
    try:
        active = _enter("/".join(_THREAD.names), where)
        try:
            yield active.use
        finally:
            _leave(active, where)
    finally:
        _THREAD.names.pop()


def current_region() -> str:
    """Returns the names of the regions that this thread is in; empty outside of any.

    >>> current_region()
    ''
    """
    return "/".join(_THREAD.names)


def regions(device: torch.device | str | None = None) -> tuple[RegionUse, ...]:
    """Returns what is known of all regions of a device, or of all devices.

    >>> regions("meta")
    ()
    """
    with _BOOKS.lock:
        uses = list(_BOOKS.uses.values())
    return tuple(use for use in uses if device is None or use.device == str(device))


def forget_regions() -> None:
    """Forgets all regions that have ended, and the peaks from before them.

    >>> forget_regions()
    >>> regions("cpu")
    ()
    """
    with _BOOKS.lock:
        running = [active.use for active in _BOOKS.active]
        _BOOKS.uses = {
            key: use for key, use in _BOOKS.uses.items() if any(use is r for r in running)
        }
        _BOOKS.peaks.clear()


def peak_of(device: torch.device) -> int:
    """Returns the most bytes of a GPU that were allocated at once, whatever regions have reset."""
    with _BOOKS.lock:
        earlier = _BOOKS.peaks.get(str(device), 0)
    return max(earlier, torch.cuda.max_memory_allocated(device))


def counted_device(function: str, device: torch.device | str | None) -> torch.device:
    """Returns the device of an argument, whose statistics can be read."""
    where = checked_device(function, device)
    if where.type == "cuda":
        torch.cuda.init()  # statistics do not
    return where


# --- counting -------------------------------------------------------------------------


def _enter(name: str, device: torch.device) -> _Active:
    with _BOOKS.lock:
        _fold_peaks(device)
        use = _BOOKS.uses.setdefault((str(device), name), RegionUse(name, str(device)))
        before = _count(device)
        active = _Active(use, before, before["used"])
        _BOOKS.active.append(active)
    return active


def _leave(active: _Active, device: torch.device) -> None:
    with _BOOKS.lock:
        _fold_peaks(device)
        _BOOKS.active[:] = [other for other in _BOOKS.active if other is not active]
        after, before, use = _count(device), active.before, active.use
        use.runs += 1
        use.left += after["used"] - before["used"]
        if device.type == "cuda":
            use.allocated = (use.allocated or 0) + after["allocated"] - before["allocated"]
            use.peak = max(use.peak or 0, active.highest - before["used"])
        elif after["largest"] > before["largest"]:
            use.peak = max(use.peak or 0, after["largest"] - before["resident"])


def _fold_peaks(device: torch.device) -> None:
    """Tells all regions that run the peak since the last time, and starts a new one."""
    if device.type != "cuda":
        return
    peak, where = torch.cuda.max_memory_allocated(device), str(device)
    for active in _BOOKS.active:
        if active.use.device == where:
            active.highest = max(active.highest, peak)
    _BOOKS.peaks[where] = max(_BOOKS.peaks.get(where, 0), peak)
    torch.cuda.reset_peak_memory_stats(device)


def _count(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        known: dict[str, Any] = torch.cuda.memory_stats(device)
        return {
            "used": known.get("allocated_bytes.all.current", 0),
            "allocated": known.get("allocated_bytes.all.allocated", 0),
        }
    return process_memory()


def process_memory() -> dict[str, int]:
    """Returns what the process takes of the CPU's memory, in bytes.

    ``used`` is the C library's heap where it tells, else the resident set; ``resident`` and
    ``largest`` are the resident set now and at its most.
    """
    from cuda_ops.testing.heap import heap_reader

    unit = 1 if sys.platform == "darwin" else 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    resident = largest
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident = int(statm.read_text().split()[1]) * resource.getpagesize()
    heap = heap_reader()
    return {"used": heap() if heap else resident, "resident": resident, "largest": largest}
