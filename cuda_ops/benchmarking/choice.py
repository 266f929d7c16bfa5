"""Chooses among the candidates of a peer, for each case by time.

A library that has several ways, of which a user would take the fastest, is compared with by the
fastest: ``torch.compile`` with and without tuning, the algorithms of a BLAS, the tiles of a kernel.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import Peer

from .clock import Clock, rotated, undisturbed
from .rotation import Rotation
from .verify import Verifier, poison

#: Trains of each candidate that decide, after the one that is checked.
_ROUNDS = 7


class BestOf:
    """The candidates of a peer, by name, for :func:`choose`; a call runs the first one.

    Example::

        best = BestOf({"small tiles": small, "large tiles": large})
    """

    def __init__(self, candidates: Mapping[str, Callable[..., Any]]) -> None:
        if not candidates:
            raise ValueError("BestOf: expected at least one candidate, got none")
        self.candidates = dict(candidates)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return next(iter(self.candidates.values()))(*args, **kwargs)


@dataclass(frozen=True)
class Choice:
    """The candidate that was the fastest, and what there is to say about the others."""

    name: str
    text: str


def wrapped(wrap: Callable[[Callable[..., Any]], Any], function: Callable[..., Any]) -> Any:
    """Returns ``wrap(function)``, for a :class:`BestOf` of each candidate; what a function wants
    to be called with before each train (``before``, see :class:`~cuda_ops.spec.Peer`) stays.
    """
    if isinstance(function, BestOf):
        return BestOf({name: wrapped(wrap, f) for name, f in function.candidates.items()})
    made = wrap(function)
    before = getattr(function, "before", None)
    if before is None or getattr(made, "before", None) is before:
        return made

    @functools.wraps(made, updated=())
    def with_before(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs)

    with_before.before = before  # type: ignore[attr-defined]  # functions have no such type
    return with_before


def prepare(function: Callable[..., Any], rotation: Rotation) -> Callable[[], None]:
    """Returns what a train of the function does before its time starts."""
    before: Callable[[Sequence[tuple[Any, ...]]], None] | None = getattr(function, "before", None)
    if before is None:
        return rotation.advance

    def advance() -> None:
        rotation.advance()
        before(rotation.arguments)

    return advance


def choose(
    best: BestOf,
    rotation: Rotation,
    verifier: Verifier | None,
    clock: Clock,
    peer: Peer | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Choice:
    """Times the candidates in turns on the arguments of a case, and returns the fastest of those
    that run and are right.

    Raises:
        BenchmarkError: none of them is; the message has the reason of the first.
    """
    faults: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    for name, function in best.candidates.items():
        progress(f"first calls of {name}")
        try:
            train = clock.train(function, rotation.arguments, prepare(function, rotation))
            if verifier is not None:
                verifier.check(train.outputs, peer)
                poison(train.outputs)
            train.outputs.clear()
        except Exception as error:  # a candidate may refuse the case, or not fit
            faults[name] = reason_of(error)
            continue
        times[name] = []
    if not times:
        name, fault = next(iter(faults.items()))
        raise BenchmarkError(f"none of its {len(faults)} candidates can be used; {name}: {fault}")
    with undisturbed():
        for round_ in range(_ROUNDS if len(times) > 1 else 0):
            for name in rotated(list(times), round_):
                function = best.candidates[name]
                train = clock.train(function, rotation.arguments, prepare(function, rotation))
                train.outputs.clear()
                times[name].append(train.seconds)
    medians = {name: statistics.median(taken) for name, taken in times.items() if taken}
    taken = min(medians, key=lambda name: medians[name]) if medians else next(iter(times))
    others = [f"{name} {medians[name] / medians[taken]:.2f}x" for name in medians if name != taken]
    others += [f"{name} not: {fault}" for name, fault in faults.items()]
    return Choice(taken, taken + (f" ({', '.join(others)})" if others else ""))


def settle(
    functions: dict[str, Callable[..., Any]],
    others: dict[str, Callable[..., Any]],
    rotation: Rotation,
    verifier: Verifier | None,
    clock: Clock,
    peers: Mapping[str, Peer],
    progress: Callable[[str], None],
) -> tuple[dict[str, str], dict[str, str]]:
    """Puts the chosen candidate in the place of every :class:`BestOf` of ``functions``, and the one
    of the same name in ``others``; removes those of which none can be used.

    Returns:
        What was taken, and why others are missing, both by name.
    """
    took: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, best in list(functions.items()):
        if not isinstance(best, BestOf):
            continue

        def of_peer(text: str, name: str = name) -> None:
            progress(f"{name}: {text}")

        try:
            choice = choose(best, rotation, verifier, clock, peers.get(name), of_peer)
        except BenchmarkError as error:
            missing[name] = reason_of(error)
            del functions[name]
            continue
        took[name] = choice.text
        functions[name] = best.candidates[choice.name]
        other = others.get(name)
        if isinstance(other, BestOf):
            others[name] = other.candidates[choice.name]
    return took, missing


def reason_of(error: Exception) -> str:
    """Returns the first line of why something cannot be used."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, BenchmarkError) else f"{type(error).__name__}: {first}"
