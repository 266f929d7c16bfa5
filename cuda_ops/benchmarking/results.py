"""Results of a run, as values and as JSON: times in seconds, sizes in bytes, rates per second."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_ops.build import cache
from cuda_ops.errors import BenchmarkError

from .memory import Memory
from .stats import Interval, geometric_mean


@dataclass(frozen=True)
class PeerResult:
    """One peer at one case: measured, or missing with a reason."""

    seconds: Interval | None = None
    #: Its time over ours: above 1 we are faster.
    ratio: Interval | None = None
    #: Seconds that an eager call keeps the host; ``None`` if that was not measured.
    host: Interval | None = None
    missing: str = ""
    #: Measured if the case asks for it; ``None`` on a CPU.
    memory: Memory | None = None
    #: Seconds per call of calls back to back, if the run asks for them.
    sustained: Interval | None = None
    #: Which of several candidates this is, for a peer that has some, and what the others took.
    took: str = ""
    #: The commit of the run that measured the peer beside the operator of that time, if it is not
    #: the case's own.
    commit: str = ""


@dataclass(frozen=True)
class CaseResult:
    """One case; if ``error`` is not empty, the times mean nothing and are left out."""

    op: str
    #: The pair that defines the operator.
    pair: str
    case: str
    reason: str
    dtype: str
    bytes: int
    flops: int
    arithmetic: str
    seconds: Interval | None = None
    #: Seconds that an eager call keeps the host; only where the device takes no longer than that.
    host: Interval | None = None
    #: Measured if the case asks for it; ``None`` on a CPU.
    memory: Memory | None = None
    #: Seconds per call of calls back to back, if the run asks for them.
    sustained: Interval | None = None
    #: The shortest time at the ceilings that were measured in the same run, and which of them sets
    #: it: ``"memory"``, ``"read"`` for a case that hardly writes, or ``"compute"``.
    floor_seconds: float = 0.0
    bound: str = ""
    calls: int = 0
    rounds: int = 0
    #: Whether every interval got as narrow as was asked for.
    converged: bool = False
    peers: dict[str, PeerResult] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str = ""
    #: The commit of the earlier run that a kept run has the case from, if any.
    commit: str = ""
    #: The part of the operator's cases that has a mean of its own, if it has such parts.
    group: str = ""

    @property
    def of_ceiling(self) -> float:
        """The share of the ceiling of its run that is reached; 1 is all of it."""
        return self.floor_seconds / self.seconds.value if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Bytes or FLOPs per second, whichever bounds the case."""
        amount = self.flops if self.bound == "compute" else self.bytes
        return amount / self.seconds.value if self.seconds else 0.0


@dataclass(frozen=True)
class Report:
    """One run."""

    environment: dict[str, str]
    #: Measured ceilings: bytes/s of ``"memory"`` (a copy) and ``"read"``, FLOP/s of each arithmetic
    #: that was needed.
    ceilings: dict[str, Interval]
    #: The same by the device's data; nothing measured may be above.
    physical: dict[str, float]
    #: Time of cold reads over time of warm ones; ``None`` if that was not tested.
    cold_over_warm: float | None
    settings: dict[str, Any]
    results: list[CaseResult]
    #: What was not measured: operator or case, and why.
    left_out: dict[str, str] = field(default_factory=dict)
    #: The ceilings that something went above and that were raised to it, with what it was.
    raised: dict[str, str] = field(default_factory=dict)

    @property
    def errors(self) -> list[CaseResult]:
        return [result for result in self.results if result.error]

    def operators(self) -> list[str]:
        return list(dict.fromkeys(result.op for result in self.results))

    def pairs(self) -> list[str]:
        return list(dict.fromkeys(result.pair for result in self.results))

    def of(self, op: str) -> list[CaseResult]:
        return [result for result in self.results if result.op == op]

    def save(self, path: Path) -> None:
        """Writes the report as JSON that :meth:`load` reads; the file is complete at all times.

        Raises:
            BenchmarkError: the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            cache.write(path, json.dumps(asdict(self), indent=1) + "\n", mode=None)
        except OSError as error:
            raise BenchmarkError(f"{path}: cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: Path) -> Report:
        """Reads what :meth:`save` wrote.

        Raises:
            BenchmarkError: the file does not exist or is something else.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            cases = [_case(entry) for entry in data.pop("results")]
            ceilings = {kind: Interval(**value) for kind, value in data.pop("ceilings").items()}
            loaded = Report(ceilings=ceilings, results=cases, **data)
        except OSError as error:
            raise BenchmarkError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchmarkError(f"{path} is not the JSON of a benchmark run") from error
        from .raised import raised  # which needs the classes of this module

        return raised(loaded)  # runs from before this was done when they were made


def peer_names(results: Iterable[CaseResult]) -> list[str]:
    """Returns the peers of any of the cases, in the order in which they first appear."""
    return list(dict.fromkeys(name for result in results for name in result.peers))


#: A larger ratio is a cliff of the peer's, which one case could lift a whole mean by.
CLIFF = 13.0


def ratios_of(results: Iterable[CaseResult], peer: str) -> list[float]:
    """Returns a peer's ratios in those of the cases that have one."""
    found = [r.peers[peer].ratio for r in results if peer in r.peers]
    return [ratio.value for ratio in found if ratio is not None]


def mean_ratio(results: Iterable[CaseResult], peer: str, most: float = math.inf) -> float | None:
    """Returns the geometric mean of a peer's ratios, where one above ``most`` counts as that;
    ``None`` if it has none.
    """
    values = ratios_of(results, peer)
    return geometric_mean([min(value, most) for value in values]) if values else None


def groups_of(results: Iterable[CaseResult]) -> dict[str, list[CaseResult]]:
    """Returns the cases of each group that has a mean of its own, if there are several."""
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(result.group, []).append(result)
    return groups if len(groups) > 1 else {}


def _case(data: dict[str, Any]) -> CaseResult:
    peers = {name: _peer(peer) for name, peer in data["peers"].items()}
    return CaseResult(
        **{
            **data,
            "seconds": _interval(data["seconds"]),
            "host": _interval(data["host"]),
            "memory": _memory(data.get("memory")),
            "sustained": _interval(data.get("sustained")),
            "peers": peers,
            "notes": tuple(data["notes"]),
        }
    )


def _peer(data: dict[str, Any]) -> PeerResult:
    return PeerResult(
        **{
            **data,
            **{
                name: _interval(data.get(name))
                for name in ("seconds", "ratio", "host", "sustained")
            },
            "memory": _memory(data.get("memory")),
        }
    )


def _memory(data: dict[str, Any] | None) -> Memory | None:
    return None if data is None else Memory(**data)  # runs from before it was measured have none


def _interval(data: dict[str, float] | None) -> Interval | None:
    return None if data is None else Interval(**data)
