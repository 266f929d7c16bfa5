"""Stalls a stream for a while, so that the work queued behind comes late."""

from __future__ import annotations

import ctypes

import torch

#: Seconds for one call of ``usleep``, which must be less than 1.
_MOST = 0.9


def stall(seconds: float) -> None:
    """Holds the current stream for ``seconds``; the host goes on at once.

    The driver calls the C library's ``usleep`` when the stream gets there, so neither Python nor
    the GPU is kept busy. ``torch.cuda._sleep`` may take hours on a GPU that is shared: its kernel
    waits for its multiprocessor's clock, which is reset when another process dies of an error.

    Raises:
        RuntimeError: the driver refuses.
    """
    driver, usleep = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None).usleep
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    while seconds > 0:
        microseconds = ctypes.c_void_p(int(min(seconds, _MOST) * 1e6))
        error = driver.cuLaunchHostFunc(stream, ctypes.cast(usleep, ctypes.c_void_p), microseconds)
        if error:
            raise RuntimeError(f"cuLaunchHostFunc failed with error {error}")
        seconds -= _MOST
