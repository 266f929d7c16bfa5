"""Memory that a call does not give back."""

from __future__ import annotations

import ctypes
import gc

import torch

from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.draw import Draw

_CALLS = 1000
#: Bytes per call below which growth is caches and counters, not a leak.
_NOISE = 8


class _Mallinfo2(ctypes.Structure):
    """glibc's view of its heap: ``hblkhd`` is in use in mappings, ``uordblks`` elsewhere."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@check("leaks", None, "memory leak", Draw(1, range(64, 4097)))
def leaks(case: Case) -> None:
    """1,000 calls leave no more memory in use, of the heap and of the GPU, than one did."""
    args = case.arguments()
    for _ in range(_CALLS // 10):
        case.call(*args)
    before = _in_use(case)
    for _ in range(_CALLS):
        case.call(*args)
    grown = [(after - was) / _CALLS for was, after in zip(before, _in_use(case), strict=True)]
    assert max(grown) < _NOISE, f"each call keeps {max(grown):.0f} bytes"


def _in_use(case: Case) -> list[int]:
    gc.collect()
    if case.on_cuda:
        torch.cuda.synchronize()
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise NotRunError("needs a C library with mallinfo2") from None
    mallinfo2.restype = _Mallinfo2
    heap = mallinfo2()
    found = [heap.uordblks + heap.hblkhd]
    if case.on_cuda:
        free, total = torch.cuda.mem_get_info(case.device)
        found += [torch.cuda.memory_allocated(case.device), total - free]
    return found
