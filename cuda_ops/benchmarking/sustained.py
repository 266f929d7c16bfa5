"""Times calls back to back for seconds, so that the power limit sets the clocks.

A train is over within a millisecond, and a GPU that was idle before runs it at its highest clocks.
Under lasting load it lowers them until it stays below its power limit, so a kernel that needs less
energy wins there, though it may lose a train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from .clock import Clock, rotated, undisturbed
from .stats import Interval, median_interval

#: Turns of each function.
_TURNS = 3
#: Seconds of work between two events: many calls, and short beside the whole.
_CHUNK = 0.02
#: Chunks that the host may be ahead of the device.
_AHEAD = 4


def sustained(
    functions: Mapping[str, Callable[..., Any]],
    arguments: Sequence[tuple[Any, ...]],
    clock: Clock,
    seconds: float,
    per_call: Mapping[str, float],
) -> dict[str, Interval]:
    """Runs each function for ``seconds`` in turns, and returns the seconds that a call took in the
    later half of each turn, when clocks have settled.

    On a GPU its own events measure; results are not checked, and are released at once.

    Args:
        functions: by name.
        arguments: those of several calls, which go round.
        clock: says which device it is.
        seconds: how long a turn lasts.
        per_call: about how long a call of each function takes.

    Example::

        sustained({"mm": torch.mm}, [(a, b)], clock, 2.0, {"mm": 0.002})["mm"].value
    """
    taken: dict[str, list[float]] = {name: [] for name in functions}
    turn = _turn if clock.device.type == "cuda" else _turn_of_cpu
    with undisturbed():
        for round_ in range(_TURNS):
            for name in rotated(list(functions), round_):
                calls = max(1, round(_CHUNK / max(per_call[name], 1e-9)))
                taken[name].append(turn(functions[name], arguments, seconds, min(calls, 1000)))
    return {name: median_interval(times) for name, times in taken.items()}


def _turn(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], seconds: float, calls: int
) -> float:
    events = [_recorded()]
    begin, number = perf_counter(), 0
    halfway = 0
    while True:
        for _ in range(calls):
            function(*arguments[number % len(arguments)])
            number += 1
        events.append(_recorded())
        if len(events) > _AHEAD:
            events[-_AHEAD].synchronize()
        elapsed = perf_counter() - begin
        if not halfway and elapsed > seconds / 2:
            halfway = len(events) - 1
        if elapsed > seconds and len(events) - 1 > halfway:
            break
    events[-1].synchronize()
    milliseconds: float = events[halfway].elapsed_time(events[-1])
    return milliseconds / 1e3 / ((len(events) - 1 - halfway) * calls)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _turn_of_cpu(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], seconds: float, calls: int
) -> float:
    begin, number = perf_counter(), 0
    halfway: tuple[float, int] | None = None
    while True:
        for _ in range(calls):
            function(*arguments[number % len(arguments)])
            number += 1
        now = perf_counter()
        if halfway is None:
            if now - begin > seconds / 2:
                halfway = now, number
        elif now - begin > seconds:
            return (now - halfway[0]) / (number - halfway[1])
