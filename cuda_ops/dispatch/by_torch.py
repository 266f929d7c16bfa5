"""Chooses what a CPU runs: an operator's own kernel, or torch's operators where a binding names
them, ``.cpu<f, g>()``.

An operator's own kernel is written to be read and compared with: exact, and slow. What torch has is
as fast as torch. Both give the same within rounding, which the check ``by_torch`` holds them to.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cuda_ops.dispatch.library import Kernel, Library
from cuda_ops.errors import CudaOpsError

if TYPE_CHECKING:
    from cuda_ops.dispatch.operator import Operator

#: ``own``: operators run their own CPU kernels. Read where a library is loaded.
SWITCH = "CUDA_OPS_CPU"

_lock = threading.RLock()
#: Operators of which torch does the work on a CPU, and the kernel that says so.
_operators: weakref.WeakKeyDictionary[Operator, tuple[Library, Kernel, int]] = (
    weakref.WeakKeyDictionary()
)
#: What each `kernels` that has not ended asks for; the one that began last decides.
_asked: dict[object, bool] = {}


def point(operator: Operator, library: Library, kernel: Kernel, slot: int) -> None:
    """Points a slot at the function of a kernel that is to run."""
    with _lock:
        if kernel.by_torch:
            _operators[operator] = library, kernel, slot
        elif kernel.key == "CPU":
            _operators.pop(operator, None)
        library.store(slot, _chosen(kernel))


def clear(operator: Operator, library: Library, key: str, slot: int) -> None:
    """Points a slot at nothing, as no kernel is left for its dispatch key."""
    with _lock:
        if key == "CPU":
            _operators.pop(operator, None)
        library.store(slot, 0)


@contextlib.contextmanager
def kernels(by_torch: bool) -> Iterator[None]:
    """Has all operators run by torch on a CPU where they can, or else by kernels of their own,
    in all threads; ends where the block does.
    """
    block = object()  # blocks of several threads may end in any order
    with _lock:
        _asked[block] = by_torch
        _point_all()
    try:
        yield
    finally:
        with _lock:
            del _asked[block]
            _point_all()


def _point_all() -> None:
    for library, kernel, slot in _operators.values():
        library.store(slot, _chosen(kernel))


def wanted() -> bool:
    """Tells whether a CPU runs torch's operators where it can."""
    with _lock:
        said = os.environ.get(SWITCH) or "torch"
        if said not in ("torch", "own"):
            raise CudaOpsError(f"{SWITCH}: expected torch or own, got {said!r}")
        return next(reversed(_asked.values()), said == "torch")


def _chosen(kernel: Kernel) -> int:
    return kernel.by_torch if kernel.by_torch and wanted() else kernel.call
