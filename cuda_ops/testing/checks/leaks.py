"""Memory that a call does not free."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cuda_ops.testing.arguments import each
from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.device_events import device_events
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.heap import heap_reader
from cuda_ops.testing.samples import Layout, TensorArg, layouts_of
from cuda_ops.testing.tolerance import is_floating

_CALLS, _ROUNDS = 1000, 3
#: Calls of a round in other layouts; what all layouts leak has shown by then.
_FEW_CALLS = 200
#: The driver's count for a GPU includes other processes, which may grow for a while.
_MOST_ROUNDS = 20
#: Bytes per call below which growth is caches and counters, not a leak.
_NOISE = 8
#: The driver itself keeps 37 bytes for each launch (torch's own operators; H200, 2026-11-21).
_LAUNCH_NOISE, _LEAST_LAUNCHES = 64, 8


@check("leaks", None, "memory leak", Draw(1, range(64, 4097)))
def leaks(case: Case) -> None:
    """Checks whether each of several rounds of 1,000 calls leaves more memory in use: contiguous
    arguments, then strided and broadcast ones, for which operators make copies, and those of zeros
    and of NaN, for which they may return early.
    """
    _keeps_none(case, case.arguments(), _CALLS, "")
    refused: Exception | None = None
    others = {kind: _laid_out(case, layouts) for kind, layouts in _LAYOUTS.items()}
    others |= {kind: _filled(case, value) for kind, value in _VALUES.items()}
    for kind, args in others.items():
        try:
            case.call(*args)
        except (RuntimeError, ValueError) as refusal:
            if "CUDA error" in str(refusal):
                raise
            refused = refusal
            continue
        _keeps_none(case, args, _FEW_CALLS, f" with {kind} arguments")
    if refused is not None:
        raise NotRunError(f"the operator refuses some layouts: {refused}") from refused


#: The layouts of tensors, by what they are called; the first that a tensor's rank allows.
_LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "strided": ("transposed", "stepped"),
    "broadcast": ("expanded",),
}


#: Values of all floating tensors, which may take an early way out.
_VALUES = {"zero": 0.0, "NaN": math.nan}


def _filled(case: Case, value: float) -> tuple[Any, ...]:
    """Returns the arguments, floating ones all of one value."""
    return tuple(
        each(lambda v: torch.full_like(v, value) if is_floating(v) else v, arg)
        for arg in case.arguments()
    )


def _laid_out(case: Case, layouts: tuple[Layout, ...]) -> tuple[Any, ...]:
    """Returns the arguments in the first of the layouts that fits; what is written stays dense, and
    so do indices that must differ.
    """
    op = case.subject.op
    dense = [op.argument_names[i] for i in op.written]

    def changed(name: str, arg: Any) -> Any:
        if not isinstance(arg, TensorArg) or name in dense or arg.distinct:
            return arg
        fitting = [layout for layout in layouts if layout in layouts_of(arg.shape)]
        return replace(arg, layout=fitting[0]) if fitting else arg

    named = zip(op.argument_names, case.sample.args, strict=False)
    args = tuple(each(partial(changed, name), arg) for name, arg in named)
    return replace(case.sample, args=args).make(case.device)


def _keeps_none(case: Case, args: tuple[Any, ...], calls: int, kind: str) -> None:
    started = time.monotonic()
    with _only_new_objects_collected():
        # Caches grow once, a leak grows each time.
        grown = [_growth(case, args, calls) for _ in range(_ROUNDS)]
        while case.on_cuda and len(grown) < _MOST_ROUNDS and min(g[-1] for g in grown) >= _NOISE:
            grown.append(_growth(case, args, calls))
        waited = time.monotonic() - started
    heap, *gpu = map(min, zip(*grown, strict=True))
    assert heap < _noise(case, args, heap), f"each call{kind} keeps {heap:.0f} bytes of memory"
    if max(gpu, default=0) < _NOISE:
        return
    own, _ = gpu
    if own < _NOISE and _others_grow(case, waited / len(grown)):
        raise NotRunError("other processes take ever more of the GPU's memory")
    raise AssertionError(f"each call{kind} keeps {max(gpu):.0f} bytes of GPU memory")


def _others_grow(case: Case, seconds: float) -> bool:
    """Tells whether the driver counts more memory after times without a call."""
    for _ in range(_ROUNDS):
        before = _in_use(case)[-1]
        time.sleep(seconds)
        if _in_use(case)[-1] > before:
            return True
    return False


def _noise(case: Case, args: tuple[Any, ...], heap: float) -> float:
    """Returns the bytes of memory below which a call's growth is no leak of the operator."""
    if not case.on_cuda:
        return _NOISE
    few = _LAUNCH_NOISE * _LEAST_LAUNCHES
    return few if heap < few else _LAUNCH_NOISE * len(device_events(lambda: case.call(*args)))


@contextlib.contextmanager
def _only_new_objects_collected() -> Iterator[None]:
    """Limits collections to what the calls left: a look at all of torch takes 0.2 s."""
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:  # else other code froze them
            gc.unfreeze()


def _growth(case: Case, args: tuple[Any, ...], calls: int) -> list[float]:
    """Returns the bytes that a call adds to the heap and to the GPU's memory."""
    before = _in_use(case)
    for _ in range(calls):
        case.call(*args)
    return [(after - was) / calls for was, after in zip(before, _in_use(case), strict=True)]


def _in_use(case: Case) -> list[int]:
    gc.collect()
    if case.on_cuda:
        torch.cuda.synchronize()
    if (heap := heap_reader()) is None:
        raise NotRunError("needs a C library with mallinfo2")
    found = [heap()]
    if case.on_cuda:
        free, total = torch.cuda.mem_get_info(case.device)
        found += [torch.cuda.memory_allocated(case.device), total - free]
    return found
