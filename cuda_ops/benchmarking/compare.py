"""Times operator and peers in turns until the intervals are narrow or time is up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import Peer

from .choice import prepare, reason_of
from .clock import Clock, Train, rotated, undisturbed
from .rotation import Rotation
from .stats import LEAST_SAMPLES, Interval, median_interval, ratio_interval
from .verify import Verifier, poison

#: The operator's name among those that are compared.
OURS = "cuda_ops"
#: Calls in a train, at most.
MOST_CALLS = 64
_MOST_ROUNDS = 300
# How long the device may work on after the last call: the larger of seconds and a share of the
# train.
_TAIL_SECONDS, _TAIL_SHARE = 50e-6, 0.2
# This many times a comparison's time, and at least this many seconds, may be spent to see whether
# nearly every round exceeds that.
_PATIENCE, _PATIENCE_SECONDS = 10, 5.0


@dataclass(frozen=True)
class Settings:
    """When a comparison is done."""

    #: The relative half-width that every interval must reach.
    precision: float = 0.01
    #: Seconds after which a case ends without that, marked as not converged.
    seconds: float = 3.0
    #: Samples of the host's latency, and calls in each.
    latency_rounds: int = 20
    latency_calls: int = 100
    #: Seconds of calls back to back for each turn of a sustained figure; 0 for none.
    sustained: float = 0.0


#: For ``--quick``: enough to see whether something is badly off.
QUICK = Settings(precision=0.05, seconds=0.3, latency_rounds=8, latency_calls=50)


@dataclass
class Comparison:
    """The result of all rounds."""

    seconds: dict[str, Interval]
    #: Peer time over ours, by peer.
    ratios: dict[str, Interval]
    rounds: int
    converged: bool
    #: Why a peer could not be compared, by peer.
    missing: dict[str, str] = field(default_factory=dict)
    #: The functions that made the GPU wait for the host, whose time they then include.
    waiting: list[str] = field(default_factory=list)


def compare(
    functions: Mapping[str, Callable[..., Any]],
    rotation: Rotation,
    verifier: Verifier | None,
    clock: Clock,
    settings: Settings,
    peers: Mapping[str, Peer] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    ours: str = OURS,
) -> Comparison:
    """Times ``functions``, which include ``ours``, on the same arguments.

    Every train of every function is checked; ``peers`` says by name how far a peer's is. Without a
    ``verifier`` none is, and results keep their values. A peer that fails before the rounds start
    is left out and named. ``progress`` is called before the first calls of each function and when
    the rounds start, but not during them.

    Raises:
        BenchmarkError: our result is wrong, or a peer's is during the rounds; or the device still
            works after the last call has ended.
    """
    alive = dict(functions)
    missing: dict[str, str] = {}

    def run(name: str) -> Train:
        train = clock.train(alive[name], rotation.arguments, prepare(alive[name], rotation))
        if verifier is None:
            return train
        try:
            verifier.check(train.outputs, (peers or {}).get(name))
        except BenchmarkError as error:
            raise BenchmarkError(f"{name} {error}") from error
        poison(train.outputs)
        return train

    for name in functions:
        progress(f"first calls of {name}")  # a peer may compile, and tune itself for minutes
        try:
            run(name), run(name)
        except Exception as error:
            if name == ours:
                raise
            del alive[name]
            missing[name] = reason_of(error)
    trains: dict[str, list[Train]] = {name: [] for name in alive}
    progress("timing in turns")
    begin, round_ = perf_counter(), 0
    with undisturbed():
        while True:
            for name in rotated(list(alive), round_):
                train = run(name)
                train.outputs.clear()
                trains[name].append(train)
            round_ += 1
            comparison = _summary(trains, round_, missing, settings, ours)
            elapsed = perf_counter() - begin
            over = elapsed > settings.seconds or round_ >= _MOST_ROUNDS
            if comparison.converged or (over and round_ >= LEAST_SAMPLES):
                refusal = _tail(trains, len(rotation.arguments))
                if refusal and len(trains) == 1:  # no peer shows what other processes do
                    nothing = _trains_of_nothing(clock, rotation)
                    refusal = _tail(trains, len(rotation.arguments), nothing)
                # Another process on the device lengthens some rounds, so more of them may tell.
                patience = max(_PATIENCE * settings.seconds, _PATIENCE_SECONDS)
                if not refusal or elapsed > patience or round_ >= _MOST_ROUNDS:
                    break
    if refusal:
        raise BenchmarkError(refusal)
    return comparison


def _summary(
    trains: dict[str, list[Train]],
    rounds: int,
    missing: dict[str, str],
    settings: Settings,
    ours: str,
) -> Comparison:
    times = {name: [train.seconds for train in mine] for name, mine in trains.items()}
    seconds = {name: median_interval(mine) for name, mine in times.items()}
    ratios = {
        name: ratio_interval(theirs, times[ours]) for name, theirs in times.items() if name != ours
    }
    # Our time and every ratio; a table is not read for a peer's time alone.
    widest = max(i.half_width for i in (seconds[ours], *ratios.values()))
    converged = rounds >= LEAST_SAMPLES and widest <= settings.precision
    waiting = [name for name, mine in trains.items() if not all(train.backlogged for train in mine)]
    return Comparison(seconds, ratios, rounds, converged, missing, waiting)


def _trains_of_nothing(clock: Clock, rotation: Rotation) -> list[Train]:
    # With a clock of its own, since a clock plans a train by what the last one took.
    fresh = type(clock)(clock.device, clock.flush)
    return [fresh.train(lambda *args: None, rotation.arguments) for _ in range(LEAST_SAMPLES)]


def _tail(
    trains: Mapping[str, list[Train]], calls: int, nothing: Sequence[Train] | None = None
) -> str:
    """Returns an error that names a function that leaves the device working in nearly every round,
    beyond what trains of ``nothing`` do; empty if none does.
    """

    def low(seconds: Iterable[float]) -> float:
        # Nearly every, since a host that was interrupted while it waited sees no work any more.
        ordered = sorted(seconds)
        return ordered[len(ordered) // 10]

    def lasts(mine: Sequence[Train]) -> float:
        return low(train.tail for train in mine) - low(train.idle for train in mine)

    lasting = {name: lasts(mine) for name, mine in trains.items()}
    for name, mine in trains.items():
        # What all others show as well is work of other processes.
        others = [seconds for other, seconds in lasting.items() if other != name]
        others += [lasts(nothing)] if nothing else []
        tail = lasting[name] - max(0.0, min(others, default=0.0))
        timed = statistics.median(train.seconds for train in mine) * calls
        if tail > max(_TAIL_SECONDS, _TAIL_SHARE * timed):
            return (
                f"{name} leaves the device working for {tail * 1e6:.0f} us after its last call has "
                "ended on the current stream: it uses another stream and does not wait for it"
            )
    return ""


def calls_for(seconds: float, clock: Clock) -> int:
    """Returns how many calls of this length make a train: at least two, enough for the clock."""
    return max(2, min(MOST_CALLS, math.ceil(clock.train_seconds / max(seconds, 1e-9))))


def quick_seconds(
    function: Callable[..., Any], rotation: Rotation, clock: Clock, budget: float
) -> float:
    """Returns the median seconds of a call, unchecked, from about ``budget`` seconds of calls.

    This is for a first estimate, and for watching a kernel change.
    """
    clock.train(function, rotation.arguments, rotation.advance)
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 3 or (perf_counter() - begin < budget and len(times) < _MOST_ROUNDS):
        times.append(clock.train(function, rotation.arguments, rotation.advance).seconds)
    return statistics.median(times)
