"""Keeps torch's profiler to one block: there is one, and a second start takes it from the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch.autograd import profiler as torch_profiler

#: What each profiler of torch calls to start: ``torch.profiler.profile``,
#: ``torch.autograd.profiler.profile``, and those that emit ranges for other tools.
_STARTS = ("_prepare_profiler", "_enable_profiler")


def check_free(function: str) -> None:
    """Raises RuntimeError if a profiler of torch is running."""
    if torch_profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        raise _other(function, "to be running")


@contextlib.contextmanager
def kept(function: str) -> Iterator[None]:
    """Refuses other profilers of torch in the block, which has started its own, in all threads.

    torch itself does not: the second profiler ends the first, whose results are empty then, and
    reading them is a segmentation fault. After a start in another thread even the stop is one, so
    the start has to be refused, and the block goes on as if it were not there.
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise _other(function, "to start in its block")

    before = {name: getattr(torch_profiler, name) for name in _STARTS}
    try:
        for name in _STARTS:
            setattr(torch_profiler, name, refuse)
        yield
    finally:
        for name, start in before.items():
            setattr(torch_profiler, name, start)


def _other(function: str, doing: str) -> RuntimeError:
    return RuntimeError(
        f"{function}: expected no other trace or profiler of torch {doing}, got one; only one at a "
        "time can record"
    )
