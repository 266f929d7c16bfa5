"""What runs on a GPU during a call: kernels with their launch configurations, copies, memsets."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

Dims = tuple[int, int, int]
#: What the profiler calls events that run on a GPU.
_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"}


@dataclass(frozen=True)
class DeviceEvent:
    """One thing that ran on a GPU."""

    name: str
    #: ``kernel``, ``copy`` or ``memset``.
    kind: str
    stream: int
    #: In microseconds.
    start: float
    end: float
    #: Blocks, and threads of a block; zeros for copies and memsets.
    grid: Dims = (0, 0, 0)
    block: Dims = (0, 0, 0)
    #: Bytes of shared memory of a block, static and dynamic.
    shared: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]


def device_events(body: Callable[[], object]) -> list[DeviceEvent]:
    """Runs ``body`` and returns what it ran on the current GPU, by start; empty if the profiler
    sees none.

    Example::

        launches = [e for e in device_events(lambda: x + x) if e.kind == "kernel"]
    """
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    # Without acc_events torch 2.10 and 2.11 warn of what several cycles would lose; this is one.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        body()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        # The events that Python is given know no grid and no block.
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        found = json.loads(trace.read_bytes())["traceEvents"]
    events = [_event(event) for event in found if event.get("cat") in _CATEGORIES]
    return sorted(events, key=lambda event: event.start)


def _event(event: dict[str, object]) -> DeviceEvent:
    args = event["args"]
    assert isinstance(args, dict)
    start, took = float(str(event["ts"])), float(str(event["dur"]))
    return DeviceEvent(
        str(event["name"]),
        _CATEGORIES[str(event["cat"])],
        int(args["stream"]),
        start,
        start + took,
        _dims(args.get("grid")),
        _dims(args.get("block")),
        int(args.get("shared memory", 0)),
    )


def _dims(found: list[int] | None) -> Dims:
    return (0, 0, 0) if found is None else (found[0], found[1], found[2])
