"""Results of a run, as values and as JSON: times in seconds, sizes in bytes, rates per second."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    #: The shortest time at the ceilings that were measured in the same run, and which of them sets
    #: it: ``"memory"`` or ``"compute"``.
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

    @property
    def of_ceiling(self) -> float:
        """The share of the measured ceiling that is reached; 1 is all of it."""
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
    #: Measured ceilings: bytes/s of ``"memory"``, FLOP/s of each arithmetic that was needed.
    ceilings: dict[str, Interval]
    #: The same by the device's data; nothing measured may be above.
    physical: dict[str, float]
    #: Time of cold reads over time of warm ones; ``None`` if that was not tested.
    cold_over_warm: float | None
    settings: dict[str, Any]
    results: list[CaseResult]
    #: What was not measured: operator or case, and why.
    left_out: dict[str, str] = field(default_factory=dict)

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
        """Writes the report as JSON that :meth:`load` reads; the file is complete at all times."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

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
            return Report(ceilings=ceilings, results=cases, **data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchmarkError(f"{path} is not the JSON of a benchmark run: {error!r}") from error


def peer_names(results: Iterable[CaseResult]) -> list[str]:
    """Returns the peers of any of the cases, in the order in which they first appear."""
    return list(dict.fromkeys(name for result in results for name in result.peers))


def mean_ratio(results: Iterable[CaseResult], peer: str) -> float | None:
    """Returns the geometric mean of a peer's ratios; ``None`` if it has none."""
    found = [r.peers[peer].ratio for r in results if peer in r.peers]
    values = [ratio.value for ratio in found if ratio is not None]
    return geometric_mean(values) if values else None


def _case(data: dict[str, Any]) -> CaseResult:
    peers = {name: _peer(**peer) for name, peer in data["peers"].items()}
    return CaseResult(
        **{
            **data,
            "seconds": _interval(data["seconds"]),
            "host": _interval(data["host"]),
            "memory": _memory(data.get("memory")),
            "peers": peers,
            "notes": tuple(data["notes"]),
        }
    )


def _peer(
    seconds: Any, ratio: Any, host: Any, missing: str, memory: Any = None, commit: str = ""
) -> PeerResult:
    intervals = _interval(seconds), _interval(ratio), _interval(host)
    return PeerResult(*intervals, missing, _memory(memory), commit)


def _memory(data: dict[str, Any] | None) -> Memory | None:
    return None if data is None else Memory(**data)  # runs from before it was measured have none


def _interval(data: dict[str, float] | None) -> Interval | None:
    return None if data is None else Interval(**data)
