"""One measurement: a train of calls on cold caches, and what a single eager call costs the host.

On a GPU a call is shorter than its launch, and an event around one call measures mostly itself. So
a train is timed, not a call: the stream is first kept busy (the backlog), every call of the train
is enqueued behind it, and by the time the GPU gets there the host is done. Each call has arguments
of its own, which a write over the whole cache has just evicted, so each call reads from memory. At
the start of a train the caches are full of the flush's unwritten lines, as they are full of the
train's own at its end, so a train pays for as many bytes as it writes. Nothing is subtracted. Calls
that only read leave nothing unwritten, and would pay for the flush's lines: ``clean`` is for them.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Bound now, so that nothing an operator does to the time module matters.
from time import perf_counter
from typing import Any

import torch

from cuda_ops.errors import BenchmarkError
from cuda_ops.testing.stall import stall

#: How often a train is repeated with a longer backlog before it counts as one that waits for the
#: GPU.
_BACKLOG_ATTEMPTS = 4
#: Cold reads must take at least this many times as long as warm ones, or the flush does not work;
#: the second after a clean flush, which leaves them nothing to write (H200, 2026-11-24: 1.31 and
#: 1.18).
COLD_OVER_WARM, CLEAN_OVER_WARM = 1.2, 1.1


@dataclass(frozen=True)
class Train:
    """One timed train of calls."""

    #: Seconds per call.
    seconds: float
    #: What the calls returned, all of it alive until now, so that no two calls share an output.
    outputs: list[Any]
    #: Seconds that the device worked on after the last call had ended.
    tail: float = 0.0
    #: Seconds that waiting for an idle device takes; longer with more streams or other processes.
    idle: float = 0.0
    #: Whether the GPU never waited for the host.
    backlogged: bool = True


class Flush:
    """Evicts the caches by writing more than they hold. With ``clean`` it then reads that, which
    leaves no line that waits to be written to memory.
    """

    def __init__(self, device: torch.device, clean: bool = False) -> None:
        size = cache_bytes(device) * (4 if device.type == "cuda" else 2)
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)
        self._largest = torch.zeros((), dtype=torch.int32, device=device) if clean else None
        self._times = 0

    def __call__(self) -> None:
        self._times += 1
        self._buffer.fill_(self._times)
        if self._largest is not None:
            torch.amax(self._buffer, dim=0, out=self._largest)


def cache_bytes(device: torch.device) -> int:
    """Returns the size of the last cache before memory, in bytes; at most 256 MiB for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_kibibytes(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    return min(max(sizes, default=32 << 10), 256 << 10) << 10


def _kibibytes(path: Path) -> int:
    return int(path.read_text().strip().removesuffix("K"))


class CpuClock:
    """Times calls on the CPU: wall time, since a call returns when it is done."""

    def __init__(self, device: torch.device, flush: Callable[[], None]) -> None:
        self.device = device
        self.flush = flush
        #: Seconds that a train must take to be believed.
        self.train_seconds = 500e-6

    def train(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        prepare: Callable[[], None] = lambda: None,
    ) -> Train:
        """Calls ``prepare``, flushes, then times one call per entry of ``arguments``."""
        prepare()
        self.flush()
        start = perf_counter()
        outputs = [function(*args) for args in arguments]
        elapsed = perf_counter() - start
        return Train(elapsed / len(arguments), outputs)


class CudaClock:
    """Times calls on a GPU: events at both ends of a train that runs without the host."""

    def __init__(self, device: torch.device, flush: Callable[[], None]) -> None:
        self.device = device
        self.flush = flush
        #: Seconds that a train must take: two events and the first launch, 2 us, are 1 % of that.
        self.train_seconds = 200e-6
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        #: Host seconds to prepare and enqueue one call, an upper bound.
        self._enqueue = 200e-6

    def train(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        prepare: Callable[[], None] = lambda: None,
    ) -> Train:
        """Does the same as :meth:`CpuClock.train`, on the current stream."""
        margin = 1.5
        for _ in range(_BACKLOG_ATTEMPTS):
            train = self._attempt(function, arguments, prepare, margin)
            if train.backlogged:
                break
            margin *= 3
        return train

    def _attempt(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        prepare: Callable[[], None],
        margin: float,
    ) -> Train:
        torch.cuda.synchronize(self.device)
        begin = perf_counter()
        stall(margin * (50e-6 + self._enqueue * len(arguments)))
        # Behind the backlog, so that a kernel on another stream that does not wait sees old values.
        prepare()
        self.flush()
        self._start.record()
        outputs = [function(*args) for args in arguments]
        self._end.record()
        enqueued = perf_counter()
        backlogged = not self._start.query()
        self._end.synchronize()
        ended = perf_counter()
        torch.cuda.synchronize(self.device)
        quiet = perf_counter()
        tail = quiet - ended
        torch.cuda.synchronize(self.device)
        idle = perf_counter() - quiet
        if backlogged:
            self._enqueue = (enqueued - begin) / len(arguments)
        seconds = self._start.elapsed_time(self._end) / 1e3 / len(arguments)
        return Train(seconds, outputs, tail, idle, backlogged)


Clock = CpuClock | CudaClock


def make_clock(device: torch.device, clean: bool = False) -> Clock:
    """Makes the clock of a device; ``clean`` is that of :class:`Flush`."""
    flush = Flush(device, clean)
    return CudaClock(device, flush) if device.type == "cuda" else CpuClock(device, flush)


def prove_cold(clock: Clock, least: float = COLD_OVER_WARM) -> float:
    """Times the same reads on flushed and on warm caches; returns cold time over warm time.

    Raises:
        BenchmarkError: cold reads take less than ``least`` times as long as warm ones, so the flush
            does not evict.
    """
    # Two buffers that fit in the cache together with anything else that is there.
    numel = cache_bytes(clock.device) // 4 // 4
    buffers = [(torch.randn(numel, device=clock.device),) for _ in range(2)]
    result = torch.empty((), device=clock.device)

    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.amax(x, dim=0, out=result)

    def touch() -> None:
        for (x,) in buffers:
            read(x)

    flush = clock.flush
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        for round_ in range(20):
            for cold in (True, False):
                # The warm train reads the buffers just before, where the cold one flushes.
                clock.flush = flush if cold else touch
                taken = clock.train(read, buffers, touch).seconds
                if round_ >= 3:
                    times[cold].append(taken)
    finally:
        clock.flush = flush
    # Other work of the machine lengthens trains of either kind: then the fastest ones tell.
    ratio = max(of(times[True]) / of(times[False]) for of in (statistics.median, min))
    if ratio < least:
        raise BenchmarkError(
            f"the cache flush does not evict: cold reads take {ratio:.2f} times as long as warm "
            f"ones, expected at least {least}"
        )
    return ratio


def host_latency(
    thunks: Mapping[str, Callable[[], Any]], device: torch.device, *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Measures how many seconds a call keeps the host, by name: one sample a round, in turns.

    A sample is a loop of ``calls`` calls without synchronization; the device is drained before and
    after, outside of the clock. Three more rounds warm up.

    Returns:
        For each name of ``thunks`` one number of seconds per call for each of ``rounds``.

    Example::

        host_latency({"silu": lambda: F.silu(x)}, x.device, rounds=20, calls=100)
    """
    times: dict[str, list[float]] = {name: [] for name in thunks}
    with undisturbed():
        for round_ in range(rounds + 3):
            for name in rotated(list(thunks), round_):
                thunk = thunks[name]
                _drain(device)
                start = perf_counter()
                for _ in range(calls):
                    thunk()
                elapsed = perf_counter() - start
                _drain(device)
                if round_ >= 3:
                    times[name].append(elapsed / calls)
    return times


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Returns the names, starting with another one each time, so that none always goes first."""
    by %= len(names)
    return [*names[by:], *names[:by]]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keeps the garbage collector from running in the middle of a measurement."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
