"""How much memory of the device a call takes, which its time does not tell.

Counted by torch's allocator, apart from all timing: what a library takes from the driver itself is
not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cuda_ops.testing.compare import tensors

from .clock import undisturbed
from .training import with_gradients

_CALLS = 3


@dataclass(frozen=True)
class Memory:
    """Bytes beyond those that were there before the call."""

    #: The most at any time, with the results; of a step of training with its gradients too.
    peak: int
    #: What a step of training has between forward and backward, without forward's results;
    #: ``None`` for other calls.
    kept: int | None = None


def memory_of(
    function: Callable[..., Any], args: tuple[Any, ...], device: torch.device, backward: bool
) -> Memory | None:
    """The memory of ``function(*args)``, with ``backward`` of a step of training; a CPU's is not
    counted, ``None``.
    """
    if device.type != "cuda":
        return None
    held = 0

    def between(results: tuple[Any, ...]) -> None:
        nonlocal held
        own = sum(result.nbytes for result in tensors(results))
        held = torch.cuda.memory_allocated(device) - own

    call = with_gradients(function, between) if backward else function
    # A block that somebody else has left may be larger than is asked for, and counts whole.
    torch.cuda.empty_cache()
    call(*args)  # what stays from the first call on, a library's workspace, is no call's peak
    peaks, kept = [], []
    with undisturbed():
        # autograd's thread may let go of a call's gradients while the next one begins, which then
        # seems to take less: the most of several calls.
        for _ in range(_CALLS):
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            call(*args)
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
            if backward:
                kept.append(held - before)
    return Memory(max(peaks), max(kept, default=None))
