"""Reserves a share of a GPU's memory, since several processes may test on the same GPU."""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from cuda_ops.testing.case import NotRunError

#: A GPU's memory is given out in sixteenths, except for a quarter, which is for contexts and for
#: tests that need little and do not ask.
_WHOLE, _GIVEN_OUT = 16, 12


@contextlib.contextmanager
def much_memory(
    device: torch.device | str, wanted: float, patience: float = 60.0
) -> Iterator[None]:
    """Waits until ``wanted`` bytes are free, and lets the block allocate no more than that.

    The block must free what it allocates.

    Raises:
        NotRunError: the GPU has less, other processes held on to it for ``patience`` seconds, or
            the block needed more.
    """
    index = torch.device(device).index or 0
    whole = torch.cuda.get_device_properties(index).total_memory
    text = f"{wanted / 1e9:.0f} GB of memory wanted"
    parts = math.ceil(wanted / whole * _WHOLE)
    if parts > _GIVEN_OUT:
        raise NotRunError(f"{text}, the GPU has {whole / 1e9:.0f}")
    deadline = time.monotonic() + patience
    with _gathered(index, parts, deadline):
        release()
        while (free := torch.cuda.mem_get_info(device)[0]) < wanted:
            if time.monotonic() > deadline:
                raise NotRunError(f"{text}, {free / 1e9:.0f} free")
            time.sleep(0.2)
        mine = torch.cuda.memory_reserved(index)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (mine + wanted) / whole), index)
        try:
            yield
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was allocated
            raise NotRunError(f"{text}, which was not enough") from None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
            release()


def release() -> None:
    """Gives unused memory back to the device, that of reference cycles included."""
    gc.collect()
    torch.cuda.empty_cache()


def _gathered(index: int, count: int, deadline: float) -> contextlib.ExitStack:
    """Holds ``count`` parts until the stack is closed.

    Only one process gathers parts at a time: two with half of theirs would wait for each other.
    """
    folder, uuid = Path(tempfile.gettempdir()), torch.cuda.get_device_properties(index).uuid
    # The operating system releases the locks of a process that dies.
    queue, *parts = (
        FileLock(folder / f"cuda_ops-memory-{uuid}-{name}.lock", mode=0o666)
        for name in ("queue", *range(_GIVEN_OUT))
    )
    with contextlib.ExitStack() as held:
        try:
            with queue.acquire(timeout=max(0.0, deadline - time.monotonic())):
                for _ in range(count):
                    held.enter_context(_any(parts, deadline))
        except Timeout as error:
            raise NotRunError("other tests had the GPU's memory for too long") from error
        return held.pop_all()


def _any(parts: list[FileLock], deadline: float) -> contextlib.AbstractContextManager[object]:
    """Locks a free part and takes it off the list."""
    while True:
        for part in parts:
            with contextlib.suppress(Timeout):
                proxy = part.acquire(blocking=False)
                parts.remove(part)
                return proxy
        if time.monotonic() > deadline:
            raise Timeout(parts[0].lock_file)
        time.sleep(0.02)
