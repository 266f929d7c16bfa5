"""Measures how much memory of the device a call takes.

torch's allocator counts it, in calls that are not timed. Memory that a library takes from the
driver itself is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from cuda_ops.testing.tolerance import tensors

from .clock import undisturbed
from .training import with_gradients

_CALLS = 3


@dataclass(frozen=True)
class Memory:
    """Bytes beyond those that were allocated before the call."""

    #: The most at any time, results included, and gradients too for a step of training.
    peak: int
    #: What a step of training keeps between forward and backward, without forward's results;
    #: ``None`` for other calls.
    kept: int | None = None


def memory_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: torch.device,
    backward: bool,
    fixed: Collection[int] = (),
) -> Memory | None:
    """Measures ``function(*args)``, or with ``backward`` a step of training, in which the arguments
    at the positions ``fixed`` have no gradient; ``None`` on a CPU.
    """
    if device.type != "cuda":
        return None
    held = 0

    def between(results: tuple[Any, ...]) -> None:
        nonlocal held
        own = sum(result.nbytes for result in tensors(results))
        held = torch.cuda.memory_allocated(device) - own

    call = with_gradients(function, between, fixed) if backward else function
    # A block left in the cache may be larger than is asked for, and would count whole.
    torch.cuda.empty_cache()
    call(*args)  # what it leaves for good, such as a library's workspace, must not count
    peaks, kept = [], []
    with undisturbed():
        # autograd's thread may free a call's gradients while the next call begins, which then
        # seems to take less. So the most of several calls counts.
        for _ in range(_CALLS):
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            call(*args)
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
            if backward:
                kept.append(held - before)
    return Memory(max(peaks), max(kept, default=None))
