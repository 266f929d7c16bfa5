"""Tells which cases fit a device, and how much memory their arguments may take."""

from __future__ import annotations

import torch

from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import BenchmarkCase

from .clock import cache_bytes
from .rotation import shared_arguments

#: What a CPU can do in reasonable time.
_MOST_CPU_BYTES, _MOST_CPU_FLOPS = 300 << 20, 10**9
#: What all calls share must be this many times the last cache, so that little of it is cached.
_SHARED_CACHES = 64


def free(device: torch.device) -> int:
    """Returns the bytes that all copies of a case may take together."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.6)
    return 4 * _MOST_CPU_BYTES


def footprint(case: BenchmarkCase) -> int:
    """Returns the most bytes of a copy: arguments, their values, outputs, a peer's temporaries."""
    return max(1, 3 * (case.bytes - _shared_bytes(case)))


def too_large(case: BenchmarkCase, device: torch.device) -> str:
    """Returns why the case is too large for the device; empty if it is not."""
    try:
        shared = _shared_bytes(case)
    except Exception:
        return ""  # it will fail again when the case is measured, and become its error
    if device.type == "cpu":
        if (size := max(case.bytes, shared)) > _MOST_CPU_BYTES:
            return f"{size >> 20} MiB, too large for a CPU ({_MOST_CPU_BYTES >> 20} MiB)"
        if case.flops > _MOST_CPU_FLOPS:
            return f"{case.flops:.1e} FLOPs, too many for a CPU ({_MOST_CPU_FLOPS:.0e})"
    # Three times what is shared: the arguments, their values, and the absolute values.
    elif (size := 2 * footprint(case) + 3 * shared) > free(device):
        return f"{size >> 30} GiB, too large for the memory that is free"
    return ""


def check_shared(case: BenchmarkCase, device: torch.device) -> None:
    """Checks that what all calls share is too large for the caches to keep it.

    Raises:
        BenchmarkError: it is not, or the case has a backward.
    """
    if case.make_shared is None:
        return
    if case.backward:
        raise BenchmarkError(f"case {case.label!r}: make_shared is for cases without backward")
    shared, least = _shared_bytes(case), _SHARED_CACHES * cache_bytes(device)
    if shared < least:
        raise BenchmarkError(
            f"case {case.label!r}: make_shared has {shared >> 20} MiB, which the caches may "
            f"keep for the next call; expected {least >> 20} MiB, {_SHARED_CACHES} times theirs"
        )


def _shared_bytes(case: BenchmarkCase) -> int:
    return sum(t.nbytes for t in shared_arguments(case, torch.device("meta")).values())
