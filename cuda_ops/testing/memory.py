"""Most of a GPU's memory, for one test at a time: several processes may test on the same GPU."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from cuda_ops.testing.case import NotRunError


@contextlib.contextmanager
def much_memory(
    device: torch.device | str, wanted: float, patience: float = 60.0
) -> Iterator[None]:
    """Waits until so many bytes are free, and until no other process is in here.

    What the block allocates must be gone when it ends.

    Raises:
        NotRunError: the GPU has less, or others did not give it back within ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    index = torch.device(device).index or 0
    uuid = torch.cuda.get_device_properties(index).uuid
    lock = FileLock(Path(tempfile.gettempdir()) / f"cuda_ops-memory-{uuid}.lock", mode=0o666)
    try:
        lock.acquire(timeout=patience)
    except Timeout as error:
        raise NotRunError(f"other tests had the GPU's memory for {patience:.0f} s") from error
    try:
        while True:
            torch.cuda.empty_cache()
            free, whole = torch.cuda.mem_get_info(device)
            if free >= wanted:
                break
            if whole < wanted or time.monotonic() > deadline:
                raise NotRunError(f"{wanted / 1e9:.0f} GB of memory wanted, {free / 1e9:.0f} free")
            time.sleep(0.2)
        yield
    finally:
        torch.cuda.empty_cache()
        lock.release()
