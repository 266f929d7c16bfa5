"""How much of the C library's heap is in use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


class _Mallinfo2(ctypes.Structure):
    """glibc's view of its heap: ``hblkhd`` is in use in mappings, ``uordblks`` elsewhere."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.cache
def heap_reader() -> Callable[[], int] | None:
    """Returns a function that tells the bytes in use; ``None`` where the C library has none."""
    library = ctypes.CDLL(None)
    sanitizers = getattr(library, "__sanitizer_get_current_allocated_bytes", None)
    if sanitizers is not None:  # AddressSanitizer has a heap of its own
        sanitizers.restype = ctypes.c_size_t
        return lambda: int(sanitizers())
    glibcs = getattr(library, "mallinfo2", None)
    if glibcs is None:
        return None
    glibcs.restype = _Mallinfo2

    def in_use() -> int:
        heap = glibcs()
        return int(heap.uordblks + heap.hblkhd)

    return in_use
