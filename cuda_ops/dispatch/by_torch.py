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

if TYPE_CHECKING:
    from cuda_ops.dispatch.operator import Operator

#: ``own``: operators run their own CPU kernels. Read where a library is loaded.
SWITCH = "CUDA_OPS_CPU"

_lock = threading.RLock()
#: Operators of which torch does the work on a CPU, and the kernel that says so.
_operators: weakref.WeakKeyDictionary[Operator, tuple[Library, Kernel, int]] = (
    weakref.WeakKeyDictionary()
)
#: How many are within `kernels`, innermost last.
_asked: list[bool] = []


def point(operator: Operator, library: Library, kernel: Kernel, slot: int) -> None:
    """Points a slot at the function of a kernel that is to run."""
    with _lock:
        if kernel.by_torch:
            _operators[operator] = library, kernel, slot
        elif kernel.key == "CPU":
            _operators.pop(operator, None)
        library.store(slot, _chosen(kernel))


@contextlib.contextmanager
def kernels(by_torch: bool) -> Iterator[None]:
    """Has all operators run by torch on a CPU where they can, or else by kernels of their own,
    in all threads; ends where the block does.
    """
    with _lock:
        _asked.append(by_torch)
        _point_all()
    try:
        yield
    finally:
        with _lock:
            _asked.pop()
            _point_all()


def _point_all() -> None:
    for library, kernel, slot in _operators.values():
        library.store(slot, _chosen(kernel))


def _chosen(kernel: Kernel) -> int:
    wanted = _asked[-1] if _asked else os.environ.get(SWITCH, "torch") != "own"
    return kernel.by_torch if wanted and kernel.by_torch else kernel.call
