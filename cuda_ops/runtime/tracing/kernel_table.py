"""Reads what a GPU did out of a Chrome trace: kernels, copies, and what ran at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

#: Start and end, in microseconds as traces have them.
Span: TypeAlias = tuple[float, float]
Spans: TypeAlias = list[Span]

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel. What the profiler did not say of a launch is ``None``."""

    name: str
    calls: int
    seconds: float
    #: Part of the time of all kernels, from 0 to 1.
    share: float
    #: Grid, block and what follows are those of the launches that took most time together.
    grid: tuple[int, ...] | None
    block: tuple[int, ...] | None
    registers: int | None
    #: Shared memory of a block, in bytes.
    shared_bytes: int | None
    #: Threads on a multiprocessor beside the most that fit, from 0 to 1: the profiler's estimate
    #: from the launch, not a measurement.
    occupancy: float | None
    #: How many launches differ in grid, block, registers or shared memory.
    shapes: int = 1

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.calls


@dataclass(frozen=True)
class CopyTime:
    """All copies of one kind, such as ``"HtoD (Pinned -> Device)"``."""

    kind: str
    calls: int
    bytes: int
    seconds: float
    #: The part of them during which a kernel ran on another stream of the same GPU.
    overlapped_seconds: float

    @property
    def overlapped(self) -> float:
        """The part of the copies' time during which a kernel ran, from 0 to 1."""
        return self.overlapped_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Overlap:
    """What ran at the same time. Each GPU counts on its own, and the seconds of all are added."""

    #: From a GPU's first kernel, copy or memset to the end of its last one.
    span_seconds: float = 0.0
    #: Anything ran.
    busy_seconds: float = 0.0
    #: At least one kernel ran, and kernels of at least two streams ran.
    kernel_seconds: float = 0.0
    two_kernels_seconds: float = 0.0
    #: The time of all copies, and that of them during which a kernel ran on another stream.
    copy_seconds: float = 0.0
    copy_overlapped_seconds: float = 0.0

    @property
    def busy(self) -> float:
        """The part of the time from first to last during which a GPU did anything."""
        return self.busy_seconds / self.span_seconds if self.span_seconds else 0.0

    @property
    def copies(self) -> float:
        """The part of the copies' time during which a kernel ran."""
        return self.copy_overlapped_seconds / self.copy_seconds if self.copy_seconds else 0.0

    @property
    def kernels(self) -> float:
        """The part of the kernels' time during which kernels of several streams ran."""
        return self.two_kernels_seconds / self.kernel_seconds if self.kernel_seconds else 0.0


@dataclass(frozen=True)
class GpuWork:
    """What the GPUs did in a trace."""

    kernels: list[KernelTime]
    copies: list[CopyTime]
    overlap: Overlap
    #: Kernels that the host launched; more than none without a kernel means that none was recorded.
    launched: int


def gpu_work(events: Iterable[Mapping[str, Any]]) -> GpuWork:
    """Adds up the events of a Chrome trace, those under its key ``"traceEvents"``.

    >>> event = {"ph": "X", "cat": "kernel", "name": "silu", "ts": 5.0, "dur": 2.0}
    >>> work = gpu_work([event, event | {"ts": 9.0}])
    >>> work.kernels[0].calls, round(work.overlap.busy, 2)
    (2, 0.67)
    """
    work: dict[str, list[Mapping[str, Any]]] = {category: [] for category in _GPU_WORK}
    launched = 0
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        if category in work:
            work[category].append(event)
        elif category in _LAUNCHES and "LaunchKernel" in event["name"]:
            launched += 1
    lines = _lines(work["kernel"])
    copies = _copies(work["gpu_memcpy"], lines)
    everything = _lines([event for found in work.values() for event in found])
    return GpuWork(_kernels(work["kernel"]), copies, _overlap(lines, everything, copies), launched)


# --- kernels and copies ----------------------------------------------------------------


def _kernels(events: Iterable[Mapping[str, Any]]) -> list[KernelTime]:
    """Returns a row for each name, the one that took most time first."""
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event)
    whole = sum(_duration(event) for found in by_name.values() for event in found)
    rows = []
    for name, found in by_name.items():
        times: dict[tuple[Any, ...], float] = defaultdict(float)
        for event in found:
            times[_launch(event)] += _duration(event)
        grid, block, registers, shared, occupancy = max(times, key=times.__getitem__)
        time = sum(times.values())
        rows.append(
            KernelTime(
                name=name,
                calls=len(found),
                seconds=time / 1e6,
                share=min(time / whole, 1.0) if whole else 0.0,  # sums in two orders differ
                grid=grid,
                block=block,
                registers=registers,
                shared_bytes=shared,
                # Below 0 where the profiler could not tell, as on a GPU that it does not know.
                occupancy=None if occupancy is None or occupancy < 0 else occupancy / 100,
                shapes=len(times),
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)


def _launch(event: Mapping[str, Any]) -> tuple[Any, ...]:
    said = event.get("args", {})
    return (
        *(tuple(said[key]) if key in said else None for key in ("grid", "block")),
        *(said.get(key) for key in ("registers per thread", "shared memory")),
        said.get("est. achieved occupancy %"),
    )


def _copies(
    events: Iterable[Mapping[str, Any]], kernels: Mapping[tuple[Any, Any], Spans]
) -> list[CopyTime]:
    by_kind: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_kind[event["name"].removeprefix("Memcpy ")].append(event)
    rows = []
    for kind, found in by_kind.items():
        overlapped = 0.0
        for (device, stream), spans in _lines(found).items():
            others = [s for line, s in kernels.items() if line[0] == device and line[1] != stream]
            overlapped += common(spans, merged(span for other in others for span in other))
        size = sum(event.get("args", {}).get("bytes", 0) for event in found)
        time = sum(map(_duration, found))
        rows.append(CopyTime(kind, len(found), size, time / 1e6, overlapped / 1e6))
    return sorted(rows, key=lambda row: -row.seconds)


def _overlap(
    kernels: Mapping[tuple[Any, Any], Spans],
    everything: Mapping[tuple[Any, Any], Spans],
    copies: Sequence[CopyTime],
) -> Overlap:
    span = busy = one = two = 0.0
    for device in {line[0] for line in everything}:
        done = merged(s for line, found in everything.items() if line[0] == device for s in found)
        span += done[-1][1] - done[0][0]
        busy += length(done)
        lines = [found for line, found in kernels.items() if line[0] == device]
        one += at_least(1, lines)
        two += at_least(2, lines)
    return Overlap(
        span / 1e6,
        busy / 1e6,
        one / 1e6,
        two / 1e6,
        sum((copy.seconds for copy in copies), 0.0),
        sum((copy.overlapped_seconds for copy in copies), 0.0),
    )


# --- intervals -------------------------------------------------------------------------


def _lines(events: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, Any], Spans]:
    """Returns when each stream was at work, by GPU and stream."""
    spans: dict[tuple[Any, Any], Spans] = defaultdict(list)
    for event in events:
        said = event.get("args", {})
        line = said.get("device", event.get("pid")), said.get("stream", event.get("tid"))
        spans[line].append((event["ts"], event["ts"] + _duration(event)))
    return {line: merged(found) for line, found in spans.items()}


def _duration(event: Mapping[str, Any]) -> float:
    return float(event.get("dur", 0.0))


def merged(spans: Iterable[Span]) -> Spans:
    """Returns the same times as spans that are in order and do not overlap.

    >>> merged([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    result: Spans = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def common(some: Spans, others: Spans) -> float:
    """Returns the time that two lists have in common, each merged.

    >>> common([(0, 3), (4, 6)], [(2, 5)])
    2.0
    """
    return at_least(2, [some, others])


def at_least(count: int, lines: Iterable[Spans]) -> float:
    """Returns the time during which at least ``count`` of the lines are at work, each merged."""
    steps = sorted(
        step for spans in lines for start, end in spans for step in ((start, 1), (end, -1))
    )
    time, depth, before = 0.0, 0, 0.0
    for now, step in steps:
        if depth >= count:
            time += now - before
        depth, before = depth + step, now
    return time
