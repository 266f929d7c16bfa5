"""What timing by CUDA events costs: a pair around a train of launches, or a pair around each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from cuda_ops.benchmarking.clock import undisturbed
from cuda_ops.runtime.arguments import check_count
from cuda_ops.runtime.devices import checked_device
from cuda_ops.testing.stall import stall

#: Elements of the kernel that keeps the device longer than its launch keeps the host.
_LARGE = 2**26
#: A stream holds about a thousand launches and events; then the host waits for it.
_MOST_CALLS = 300
#: Host seconds to queue one call and its two events, an upper bound.
_ENQUEUE = 100e-6


@dataclass(frozen=True)
class EventCost:
    """One way to time one train, in microseconds; ``None`` for what does not exist there."""

    #: The train: what is called, and what it waits for.
    train: str
    #: ``"none"``, ``"coarse"`` or ``"fine"``: no event, a pair around the train, one around each.
    timing: str
    #: Which events, or which clock.
    events: str
    #: What the host takes for each call, its events included.
    host_per_call: float
    #: What the host takes more for each event than without events.
    host_per_event: float | None
    #: What the train takes on the device for each call, by the pair around all of it.
    device_per_call: float | None
    #: How much longer than with coarse timing that is.
    device_added: float | None
    #: What the pairs around single calls say a call takes; coarse: the same as the train.
    measured: float


@dataclass(frozen=True)
class EventOverhead(Sequence[EventCost]):
    """Rows of :func:`event_overhead`; ``str`` makes a table."""

    rows: tuple[EventCost, ...]
    #: What was measured, in words.
    about: str

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[EventCost]:
        return iter(self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and text, ready for JSON."""
        return {"about": self.about, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        header = ("train", "timing", "events", "host/call", "host/event", "device/call", "added",
                  "measured")  # fmt: skip
        table = [header, *(tuple(map(_cell, asdict(row).values())) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 3 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join([self.about, *lines])


def event_overhead(
    device: torch.device | str | int | None = None, *, calls: int = 200, rounds: int = 9
) -> EventOverhead:
    """Measures what timing by CUDA events costs the host and the device.

    Trains of ``calls`` launches are run without events, with one pair around the train, and with a
    pair around each launch; all ways in turns, the median of the rounds counts. An almost empty
    kernel is launched behind other work, so that the device's time alone shows, and again on an
    idle device, which waits for the host; a large kernel keeps the device longer than the host.

    >>> print(event_overhead("cpu", calls=10, rounds=3).about.partition(":")[0])
    no GPU

    Args:
        device: a GPU, by default the current one, or the CPU where there is none. On a CPU the same
            table is made for ``time.perf_counter``.
        calls: launches in a train.
        rounds: how often each train is run.

    Raises:
        ValueError: ``calls`` is no int from 1 to 300, ``rounds`` none of 1 or more, or
            ``device`` is neither a CPU nor a GPU of this machine.
    """
    check_count("event_overhead", "calls", calls, most=_MOST_CALLS)
    check_count("event_overhead", "rounds", rounds)
    where = checked_device("event_overhead", device)
    if where.type == "cpu":
        return _of_the_wall_clock(calls, rounds)
    with torch.cuda.device(where), undisturbed():
        return _of_events(calls, rounds)


# --- a GPU ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Microseconds for each call."""

    host: float
    device: float | None
    measured: float


_KINDS = (
    ("timing", {"enable_timing": True}),
    ("timing, blocking", {"enable_timing": True, "blocking": True}),
    ("no timing", {"enable_timing": False}),
    ("no timing, blocking", {"enable_timing": False, "blocking": True}),
)


def _of_events(calls: int, rounds: int) -> EventOverhead:
    small = torch.zeros(1, device="cuda")
    large = torch.zeros(_LARGE, device="cuda")
    trains: list[tuple[str, Callable[[], Any], bool]] = [
        ("empty kernel, queued", lambda: small.add_(1), True),
        ("empty kernel, host-bound", lambda: small.add_(1), False),
        ("large kernel, device-bound", lambda: large.add_(1), True),
    ]
    rows: list[EventCost] = []
    for name, launch, queued in trains:
        ways = [("none", _KINDS[0]), ("coarse", _KINDS[0])] + [("fine", kind) for kind in _KINDS]
        runs: list[list[_Run]] = [[] for _ in ways]
        for round_ in range(rounds + 1):
            for i, (timing, (_, options)) in enumerate(ways):
                run = _train(launch, calls, timing, options, queued)
                if round_:  # the first one warms up
                    runs[i].append(run)
        found = [_middle(of) for of in runs]
        rows += [
            _row(name, timing, kind, found[i], found[0], found[1], calls)
            for i, (timing, (kind, _)) in enumerate(ways)
        ]
    about = (
        f"microseconds on {torch.cuda.get_device_name()}, trains of {calls} calls: 'added' is what "
        "a pair of events around each call makes the device take longer"
    )
    return EventOverhead(tuple(rows), about)


def _train(
    launch: Callable[[], Any], calls: int, timing: str, options: dict[str, bool], queued: bool
) -> _Run:
    pairs = [
        (torch.cuda.Event(**options), torch.cuda.Event(**options))
        for _ in range(calls if timing == "fine" else 0)
    ]
    for pair in pairs:  # the first record makes an event
        for event in pair:
            event.record()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if queued:
        stall(50e-6 + _ENQUEUE * calls)
    if timing != "none":
        start.record()
    # Nothing but the calls and their events between the two readings of the clock.
    if timing == "fine":
        begin = perf_counter()
        for before, after in pairs:
            before.record()
            launch()
            after.record()
        host = perf_counter() - begin
    else:
        begin = perf_counter()
        for _ in range(calls):
            launch()
        host = perf_counter() - begin
    if timing != "none":
        end.record()
    torch.cuda.synchronize()
    each = host / calls * 1e6
    if timing == "none":
        return _Run(each, None, each)
    whole = start.elapsed_time(end) * 1e3 / calls
    if timing == "fine" and options["enable_timing"]:
        return _Run(each, whole, statistics.mean(a.elapsed_time(b) for a, b in pairs) * 1e3)
    return _Run(each, whole, whole)


def _row(
    train: str, timing: str, kind: str, run: _Run, bare: _Run, coarse: _Run, calls: int
) -> EventCost:
    fine = timing == "fine"
    added = None
    if fine and run.device is not None and coarse.device is not None:
        added = run.device - coarse.device
    return EventCost(
        train, timing, "" if timing == "none" else kind, run.host,
        (run.host - bare.host) / 2 if fine else None, run.device, added, run.measured,
    )  # fmt: skip


def _middle(runs: list[_Run]) -> _Run:
    devices = [run.device for run in runs if run.device is not None]
    return _Run(
        statistics.median(run.host for run in runs),
        statistics.median(devices) if devices else None,
        statistics.median(run.measured for run in runs),
    )


# --- a CPU ----------------------------------------------------------------------------


def _of_the_wall_clock(calls: int, rounds: int) -> EventOverhead:
    small, large = torch.zeros(1), torch.zeros(2**14)
    trains: list[tuple[str, Callable[[], Any]]] = [
        ("empty function", lambda: None),
        ("operator on 1 element", lambda: small.add_(1)),
        ("operator on 16384 elements", lambda: large.add_(1)),
    ]
    rows: list[EventCost] = []
    with undisturbed():
        for name, call in trains:
            coarse: list[_Run] = []
            fine: list[_Run] = []
            for round_ in range(rounds + 1):
                for runs, way in ((coarse, _coarse), (fine, _fine)):
                    run = way(call, calls)
                    if round_:
                        runs.append(run)
            bare, each = _middle(coarse), _middle(fine)
            rows += [
                EventCost(name, "coarse", "perf_counter", bare.host, None, None, None,
                          bare.measured),
                EventCost(name, "fine", "perf_counter", each.host, (each.host - bare.host) / 2,
                          None, None, each.measured),
            ]  # fmt: skip
    about = (
        f"no GPU: microseconds that readings of time.perf_counter cost, trains of {calls} calls; "
        "there are no CUDA events to measure"
    )
    return EventOverhead(tuple(rows), about)


def _coarse(call: Callable[[], Any], calls: int) -> _Run:
    begin = perf_counter()
    for _ in range(calls):
        call()
    each = (perf_counter() - begin) / calls * 1e6
    return _Run(each, None, each)


def _fine(call: Callable[[], Any], calls: int) -> _Run:
    taken = 0.0
    begin = perf_counter()
    for _ in range(calls):
        before = perf_counter()
        call()
        taken += perf_counter() - before
    whole = perf_counter() - begin
    return _Run(whole / calls * 1e6, None, taken / calls * 1e6)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.2f}"
