"""The benchmark kit's clock for any function: cold or warm caches, candidates in turns.

On a GPU the time is the device's: events at both ends of a train of calls that are all queued
before the first one runs, so launches cost nothing in between. On a CPU it is wall time. See
:mod:`cuda_ops.benchmarking.clock` for why a train is timed and not a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cuda_ops.benchmarking import capacity, clock, compare
from cuda_ops.benchmarking.kit import HOST_BOUND_SECONDS
from cuda_ops.benchmarking.rotation import Rotation
from cuda_ops.benchmarking.stats import Interval, median_interval
from cuda_ops.runtime.arguments import check_callable, check_mapping, check_positive
from cuda_ops.runtime.devices import checked_device
from cuda_ops.runtime.timing.copies import Copies
from cuda_ops.runtime.timing.timings import Timing, Timings


class Timer:
    """Times several candidates on the same arguments, in turns, round by round.

    Each call of a cold train has a copy of the tensors of its own, which has just left the caches.
    What calls write to is put back before the next train. What a function holds itself, such as
    the weights of a module, is shared by all calls and cold for the first one alone.

    >>> import torch
    >>> x = torch.ones(1000)
    >>> functions = {"relu": torch.relu, "clamp": lambda x: x.clamp(min=0)}
    >>> found = Timer(functions, (x,)).run(seconds=0.1)
    >>> found["relu"].median > 0, found["clamp"].ratio is not None
    (True, True)
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        args: tuple[Any, ...] | list[Any] = (),
        keywords: Mapping[str, Any] | None = None,
        *,
        cold: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        """Args:
            functions: the candidates by name; ratios are over the first.
            args: what each is called with; tensors inside lists and dicts count.
            keywords: keyword arguments, the same objects for every call.
            cold: whether caches are emptied before each train; else each call of a train has the
                same arguments, which were just written.
            device: where to measure; by default the device of the first tensor of ``args``, or the
                CPU.

        Raises:
            TypeError: ``functions`` is no mapping of names to callables, ``args`` no tuple or list,
                or ``keywords`` no mapping.
            ValueError: there is no function, a tensor is sparse, or ``device`` is neither a CPU nor
                a GPU of this machine.
        """  # fmt: skip
        check_mapping("Timer", "functions", functions, "a mapping of names to functions")
        if not functions:
            raise ValueError("Timer: argument 'functions': expected at least one function, got {}")
        for name, function in functions.items():
            given: Any = name
            if not isinstance(given, str):
                raise TypeError(
                    "Timer: argument 'functions': expected a str as the name of each function, got "
                    f"{given!r}"
                )
            if not callable(function):
                raise TypeError(
                    f"Timer: argument 'functions': expected something to call for {name!r}, got "
                    f"{type(function).__name__}"
                )
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                "Timer: argument 'args': expected a tuple or list of arguments, got "
                f"{type(args).__name__}; write (x,) for one"
            )
        self._args, self._cold = tuple(args), cold
        self.device = _device("Timer", device, self._args, keywords)
        bound = dict(keywords or {})
        self._functions = {
            name: functools.partial(function, **bound) if bound else function
            for name, function in functions.items()
        }

    def run(self, *, seconds: float = 1.0, precision: float = 0.02) -> Timings:
        """Times all candidates until every interval is narrow or time is up.

        A candidate other than the first that raises at its first calls is left out and named in
        ``missing``. Six rounds are run in any case.

        Args:
            seconds: when to stop, about.
            precision: the half-width that the intervals of the first time and of all ratios must
                reach, relative to the value.

        Raises:
            ValueError: ``seconds`` or ``precision`` is not a positive number.
            BenchmarkError: the device still works after a call has ended on the current stream, or
                its caches cannot be emptied.
        """
        check_positive("Timer.run", "seconds", seconds)
        check_positive("Timer.run", "precision", precision)
        on_cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_cuda else contextlib.nullcontext():
            return self._run(compare.Settings(precision=precision, seconds=seconds))

    def _run(self, settings: compare.Settings) -> Timings:
        first = next(iter(self._functions))
        ticking = _clock(self.device, self._cold)
        pair = Copies(self._args, self.device, 2, self._cold)
        estimate = compare.quick_seconds(self._functions[first], pair, ticking, budget=0.0)
        most = capacity.free(self.device) // max(1, 3 * pair.bytes_per_copy)
        calls = compare.calls_for(estimate, ticking)
        calls = min(calls, max(2, most)) if self._cold else calls
        copies = pair if calls == 2 else Copies(self._args, self.device, calls, self._cold)
        found = compare.compare(
            self._functions, copies, None, ticking, settings, ours=first
        )  # fmt: skip
        hosts = self._hosts(found, copies, settings)
        timings = {
            name: Timing(
                name, taken, found.ratios.get(name), self._what(calls, name in found.waiting),
                self._cold, calls, found.rounds, found.converged, hosts.get(name),
            )
            for name, taken in found.seconds.items()
        }  # fmt: skip
        return Timings(timings, found.missing)

    def _what(self, calls: int, waited: bool) -> str:
        if self.device.type != "cuda":
            return f"host time: the wall clock around trains of {calls} calls"
        text = f"device time: two CUDA events around trains of {calls} calls"
        return text + (", with time that the device waited for the host" if waited else "")

    def _hosts(
        self, found: compare.Comparison, copies: Rotation, settings: compare.Settings
    ) -> dict[str, Interval]:
        quick = {n: self._functions[n] for n, s in found.seconds.items()
                 if s.value <= HOST_BOUND_SECONDS}  # fmt: skip
        if self.device.type != "cuda" or not quick:
            return {}
        thunks = {n: functools.partial(f, *copies.arguments[0]) for n, f in quick.items()}
        times = clock.host_latency(
            thunks, self.device, rounds=settings.latency_rounds, calls=settings.latency_calls
        )
        return {name: median_interval(taken) for name, taken in times.items()}


def time_kernel(
    function: Callable[..., Any],
    *args: Any,
    cold: bool = True,
    seconds: float = 1.0,
    precision: float = 0.02,
    keywords: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> Timing:
    """Times one function as :class:`Timer` does several.

    >>> import torch
    >>> found = time_kernel(torch.relu, torch.ones(1000), seconds=0.1)
    >>> found.clock.partition(":")[0], found.seconds.low <= found.median <= found.seconds.high
    ('host time', True)

    Args:
        function: what to time.
        args: its arguments; on a GPU the first tensor says which.
        cold: whether caches are emptied before each train.
        seconds: when to stop, about.
        precision: the half-width that the interval must reach, relative to the time.
        keywords: keyword arguments.
        device: where to measure, if not where the first tensor is.

    Raises:
        TypeError: ``function`` cannot be called, or ``keywords`` is no mapping.
        ValueError: ``seconds`` or ``precision`` is not a positive number, a tensor is sparse, or
            ``device`` is neither a CPU nor a GPU of this machine.
        BenchmarkError: as :meth:`Timer.run`.
    """
    # Else the errors of Timer would name a function that nobody called.
    check_callable("time_kernel", "function", function)
    check_positive("time_kernel", "seconds", seconds)
    check_positive("time_kernel", "precision", precision)
    where = _device("time_kernel", device, args, keywords)
    name = getattr(function, "__name__", type(function).__name__)
    timer = Timer({name: function}, args, keywords, cold=cold, device=where)
    return timer.run(seconds=seconds, precision=precision)[name]


def _device(
    function: str,
    device: torch.device | str | None,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any] | None,
) -> torch.device:
    """Checks what calls get, and returns where to measure."""
    if keywords is not None:
        check_mapping(function, "keywords", keywords, "a mapping of names to values")
    leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        if leaf.layout != torch.strided:
            raise ValueError(
                f"{function}: argument 'args': expected strided tensors, got {leaf.layout}"
            )
    if device is None:
        device = next((leaf.device for leaf in leaves), torch.device("cpu"))
    return checked_device(function, device)


def _clock(device: torch.device, cold: bool) -> clock.Clock:
    if not cold:
        kind = clock.CudaClock if device.type == "cuda" else clock.CpuClock
        return kind(device, lambda: None)
    if device.type == "cuda":
        _prove_cold(device)
    return clock.make_clock(device)


@functools.cache
def _prove_cold(device: torch.device) -> float:
    """Raises once for each device if its caches cannot be emptied, as the kit does."""
    return clock.prove_cold(clock.make_clock(device))
