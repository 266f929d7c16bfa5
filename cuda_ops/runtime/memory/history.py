"""Snapshots and histories of torch's CUDA allocator, for torch's viewer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from cuda_ops.runtime.arguments import check_count, checked_path


def memory_snapshot(file: str | Path) -> Path:
    """Writes what torch's allocator holds, for the viewer at pytorch.org/memory_viz.

    The history of allocations and the stacks are in it if they were recorded, as
    :func:`record_memory` does.

    >>> if not torch.cuda.is_available():
    ...     try: memory_snapshot("memory.pickle")
    ...     except RuntimeError as error: assert "expected a CUDA device" in str(error)

    Returns:
        The file.

    Raises:
        TypeError: ``file`` is no path.
        RuntimeError: there is no GPU, or the allocator's backend has no snapshots.
    """
    path = checked_path("memory_snapshot", "file", file)
    _check_can_record("memory_snapshot")
    torch.cuda.memory._dump_snapshot(str(path))
    return path


@contextlib.contextmanager
def record_memory(
    file: str | Path, *, most: int = 100_000, stacks: str = "python"
) -> Iterator[Path]:
    """Records each allocation in the block with its stack, and writes a snapshot at the end.

    The file is written also where the block raises, for instance when memory runs out. A history
    that was being recorded before goes on.

    Args:
        file: where to write; open it at pytorch.org/memory_viz.
        most: allocations and frees to keep, the last ones.
        stacks: ``"python"``, or ``"all"`` for the frames of C++ too, which takes longer.

    Raises:
        RuntimeError: there is no GPU, or the allocator's backend has no snapshots.
        TypeError: ``file`` is no path.
        ValueError: ``most`` is no int of 1 or more, or ``stacks`` is another word.
    """
    path = checked_path("record_memory", "file", file)
    check_count("record_memory", "most", most)
    if stacks not in ("python", "all"):
        raise ValueError(
            f"record_memory: argument 'stacks': expected 'python' or 'all', got {stacks!r}"
        )
    _check_can_record("record_memory")
    with recorded_history(most, stacks):
        try:
            yield path
        finally:
            memory_snapshot(path)


@contextlib.contextmanager
def recorded_history(most: int, stacks: str) -> Iterator[None]:
    """Has torch keep a history for the block; one that is kept already goes on, as it is."""
    if torch._C._cuda_isHistoryEnabled():
        yield
        return
    record = torch.cuda.memory._record_memory_history
    record("all", context="all", stacks=stacks, max_entries=most, clear_history=True)
    try:
        yield
    finally:
        record(None)


def _check_can_record(function: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{function}: expected a CUDA device, got a machine without one: torch records what "
            "its CUDA allocator does and knows nothing of a CPU's; memory_by_operator works there"
        )
    torch.cuda.init()
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise RuntimeError(
            f"{function}: expected the allocator's backend 'native', got {backend!r}, which has no "
            "snapshots"
        )
