"""How long calls take: values, text, a table and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuda_ops.benchmarking.stats import Interval
from cuda_ops.benchmarking.table import ratio_text
from cuda_ops.output import time_text


@dataclass(frozen=True)
class Timing:
    """How long one call takes."""

    name: str
    #: Seconds: the median, and the bounds of its 95 % interval.
    seconds: Interval
    #: This time over that of the first candidate, taken round by round; ``None`` for the first.
    ratio: Interval | None
    #: What was measured: device or host time, and how.
    clock: str
    #: Whether caches were emptied before each train.
    cold: bool
    #: Calls in a train, and how often each train was timed.
    calls: int
    rounds: int
    #: Whether every interval got as narrow as was asked for before time was up.
    converged: bool
    #: Seconds that a call keeps the host, for calls that the device finishes about as quickly.
    host: Interval | None = None

    @property
    def median(self) -> float:
        """Seconds for one call."""
        return self.seconds.value

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and text, ready for JSON; times in seconds."""
        return asdict(self)

    def __str__(self) -> str:
        low, high = time_text(self.seconds.low), time_text(self.seconds.high)
        caches = "cold" if self.cold else "warm"
        return f"{self.name}: {time_text(self.median)} ({low} to {high}), {caches}, {self.clock}"


@dataclass(frozen=True)
class Timings(Mapping[str, Timing]):
    """What :meth:`Timer.run` found, by name."""

    timings: dict[str, Timing]
    #: Why a candidate could not be called, by name.
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def clock(self) -> str:
        """What was measured: device or host time, and how."""
        return next(iter(self.timings.values())).clock

    def __getitem__(self, name: str) -> Timing:
        return self.timings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.timings)

    def __len__(self) -> int:
        return len(self.timings)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and text, ready for JSON; times in seconds."""
        found = {name: timing.as_dict() for name, timing in self.timings.items()}
        return {"clock": self.clock, "timings": found, "missing": dict(self.missing)}

    def __rich__(self) -> Table:
        """Returns the table that ``rich.print`` shows."""
        first = next(iter(self.timings.values()))
        grid = Table(box=None, pad_edge=False)
        hosts = any(timing.host for timing in self.timings.values())
        header = ["", "median", "95 % interval", f"over {first.name}", *["host"] * hosts]
        for i, column in enumerate(header):
            grid.add_column(escape(column), justify="right" if i else "left")
        for name, timing in self.timings.items():
            bounds = f"{time_text(timing.seconds.low)} to {time_text(timing.seconds.high)}"
            ratio = "" if timing.ratio is None else ratio_text(timing.ratio)
            host = [time_text(timing.host.value) if timing.host else ""] * hosts
            mark = "" if timing.converged else " ~"
            median = time_text(timing.median) + mark
            grid.add_row(escape(name), median, bounds, ratio, *host)
        for name, reason in self.missing.items():
            grid.add_row(escape(name), "missing", escape(reason))
        caches = "cold caches" if first.cold else "warm caches"
        grid.caption = escape(
            f"{first.clock}; {caches}; {first.rounds} rounds in turns"
            + ("" if first.converged else "; ~ time was up before the intervals were narrow")
        )
        return grid

    def __str__(self) -> str:
        console = Console(width=100, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
