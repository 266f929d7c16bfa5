"""Whose turn it is in a process that runs cases: the operator's, or the kit's own.

A parent that waits can then tell an operator that hangs from a reference that takes long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

#: Hears of each turn, in a process that runs cases: whether the kit judges.
_listener: Callable[[bool], None] | None = None


def listen(listener: Callable[[bool], None]) -> None:
    """Calls ``listener`` whenever the kit begins or ends to judge."""
    global _listener
    _listener = listener


@contextlib.contextmanager
def judging() -> Iterator[None]:
    """Says that the block does not wait for the operator: it computes the reference and compares.

    Waits for the current stream first, as a comparison would in the middle: a kernel that does not
    end is the operator's.
    """
    if _listener is None:
        yield
        return
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    _listener(True)
    try:
        yield
    finally:
        _listener(False)
