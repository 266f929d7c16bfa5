"""Which cases fit a device, and how much of it their arguments may take."""

from __future__ import annotations

import torch

from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import BenchmarkCase

from .clock import cache_bytes
from .rotation import shared_arguments

#: What a CPU can do in reasonable time.
_MOST_CPU_BYTES, _MOST_CPU_FLOPS = 300 << 20, 10**9
#: What all calls of a case share is at least so many times the last cache: little of it is there.
_SHARED_CACHES = 64


def free(device: torch.device) -> int:
    """Bytes that the copies of a case may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.6)
    return 4 * _MOST_CPU_BYTES


def footprint(case: BenchmarkCase) -> int:
    """Bytes of one copy, at most: arguments, their values, outputs, a peer's intermediates."""
    return max(1, 3 * (case.bytes - _shared_bytes(case)))


def too_large(case: BenchmarkCase, device: torch.device) -> str:
    """Why the case cannot be measured there; empty if it can."""
    try:
        shared = _shared_bytes(case)
    except Exception:
        return ""  # it fails again where the case is measured, and is that case's error
    if device.type == "cpu":
        if (size := max(case.bytes, shared)) > _MOST_CPU_BYTES:
            return f"{size >> 20} MiB, too large for a CPU ({_MOST_CPU_BYTES >> 20} MiB)"
        if case.flops > _MOST_CPU_FLOPS:
            return f"{case.flops:.1e} FLOPs, too many for a CPU ({_MOST_CPU_FLOPS:.0e})"
    # What is shared, its values, and those without a sign, of which magnitudes are computed.
    elif (size := 2 * footprint(case) + 3 * shared) > free(device):
        return f"{size >> 30} GiB, too large for the memory that is free"
    return ""


def check_shared(case: BenchmarkCase, device: torch.device) -> None:
    """What all calls have in common must not wait for them in a cache.

    Raises:
        BenchmarkError: it may, or the case has a backward.
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
