"""The order in which streams and threads use the memory of graphs."""

from __future__ import annotations

import threading
from typing import Any

import torch


class InTurn:
    """Puts what is launched on a device inside of it behind all that was launched so before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: A thread of autograd takes turns with the others; a turn lasts until all is launched.
        self._lock = threading.RLock()
        self._last: Any = None
        self._handle: int | None = None

    def __enter__(self) -> None:
        # A number, as it is asked at each replay: torch's object of a stream costs far more.
        handle: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        self._lock.acquire()
        if handle != self._handle:
            try:
                self._follow(handle)
            except BaseException:
                self._lock.release()
                raise

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def _follow(self, handle: int) -> None:
        current = torch.cuda.current_stream(self.device)
        if self._last is not None:
            current.wait_stream(self._last)
        self._last, self._handle = current, handle

    def synchronize(self) -> None:
        """Waits on the host until the GPU has done all of it."""
        if (last := self._last) is not None:  # which has waited for the ones before
            last.synchronize()
