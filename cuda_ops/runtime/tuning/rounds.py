"""What tuning does with candidates: compares their results, then times them in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

from cuda_ops.benchmarking import capacity
from cuda_ops.benchmarking.clock import make_clock, rotated, undisturbed
from cuda_ops.benchmarking.compare import calls_for, quick_seconds
from cuda_ops.benchmarking.rotation import Rotation
from cuda_ops.benchmarking.stats import LEAST_SAMPLES
from cuda_ops.benchmarking.verify import shapes_of
from cuda_ops.registry import registry
from cuda_ops.runtime.timing.copies import copied
from cuda_ops.runtime.tuning.choices import DEFAULT
from cuda_ops.runtime.tuning.knobs import Knobs
from cuda_ops.spec import BenchmarkCase, Claims, OpSpec
from cuda_ops.testing import compare, tolerance

#: Rounds of one train of each candidate, and the seconds after which there are no more.
_ROUNDS, _SECONDS = 40, 5.0


def under(
    knobs: Knobs, bucket: int, settings: Mapping[str, int], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that runs under settings of the knobs, and leaves them set."""

    def run(*args: Any) -> Any:
        # A train calls it many times in a row: only the first one sets anything.
        if _set.get(knobs.library) is not run:
            knobs.choose(bucket, settings)
            _set[knobs.library] = run
        return function(*args)

    return run


#: By library, the function that set its knobs last.
_set: dict[Any, Callable[..., Any]] = {}


def refused(
    op: OpSpec, functions: Mapping[str, Callable[..., Any]], inputs: tuple[Any, ...]
) -> dict[str, str]:
    """Returns why a candidate may not be used, by name: its result differs from the default's by
    more than the operator's tolerance, or it raised.
    """
    _set.clear()
    default = functions[DEFAULT]
    expected = compare.results(op, default, inputs)
    claims: Claims = registry().plugins.ask("cuda_ops_claims", op) or Claims()
    length = compare.reduction_length(op, shapes_of(inputs), claims.sums_over)
    magnitude = min(1.0, tolerance.largest(tolerance.tensors(inputs)))
    if length > 1:  # cancellation makes a small sum as wrong as its summands
        sizes = [tolerance.size_of(v) if tolerance.is_inexact(v) else v for v in inputs]
        magnitude = tolerance.largest([*compare.results(op, default, sizes), *expected])
    found = {}
    for name, function in functions.items():
        if name == DEFAULT:
            continue
        try:
            actual = compare.results(op, function, inputs)
            if all(map(tolerance.same_bits, actual, expected)):
                continue
            worst = tolerance.errors(actual, expected, magnitude, length, factor=claims.tolerance)
        except AssertionError as error:
            found[name] = f"its result is not the default's: {error}"
        except Exception as error:  # the operator's own code
            found[name] = f"{type(error).__name__}: {error}"
        else:
            if not worst <= 1:
                found[name] = f"its result is not the default's: {worst.text}"
    return found


def rounds_of(
    functions: Mapping[str, Callable[..., Any]], inputs: tuple[Any, ...]
) -> dict[str, list[float]]:
    """Times functions in turns on cold caches, with arguments like ``inputs``; returns the seconds
    per call of each round by name.
    """
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    with torch.cuda.device(device if device.type == "cuda" else -1):
        return _rounds_on(device, functions, inputs)


def _rounds_on(
    device: torch.device, functions: Mapping[str, Callable[..., Any]], inputs: tuple[Any, ...]
) -> dict[str, list[float]]:
    _set.clear()
    clock = make_clock(device)
    case = BenchmarkCase("tuned", lambda _: copied(inputs), bytes=0)
    rotation = Rotation(case, device, 2)
    estimate = quick_seconds(functions[DEFAULT], rotation, clock, budget=0.0)
    fitting = capacity.free(device) // max(1, 3 * rotation.bytes_per_copy)
    calls = min(calls_for(estimate, clock), max(2, fitting))
    if calls > 2:
        rotation = Rotation(case, device, calls)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        clock.train(function, rotation.arguments, rotation.advance)
    begin = perf_counter()
    with undisturbed():
        for round_ in range(_ROUNDS):
            if round_ >= LEAST_SAMPLES and perf_counter() - begin > _SECONDS:
                break
            for name in rotated(list(functions), round_):
                train = clock.train(functions[name], rotation.arguments, rotation.advance)
                times[name].append(train.seconds)
    return times
