"""The memory that GPUs of one host share, on CPUs: files that the ranks map, and no streams.

All else is what GPUs run: how boxes grow, where rows lie in them, what is kept of a call.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cuda_ops.distributed import symmetric


def _mapped(path: str, count: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=count, dtype=torch.uint8)


def _spoil(path: str, count: int) -> None:
    """Fills a box that is gone with NaN, which whatever still reads it gets."""
    with contextlib.suppress(FileNotFoundError), Path(path).open("r+b") as file:
        file.write(b"\xff" * count)


class _Handle:
    """What torch returns of memory that all ranks have made: theirs, and how they wait."""

    def __init__(self, paths: Sequence[str], count: int) -> None:
        self._of_ranks = [_mapped(path, count) for path in paths]

    def get_buffer(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int
    ) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return self._of_ranks[rank].view(dtype)[offset : offset + count].view(*shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        dist.barrier()


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """Has all streams do at once what they are asked to, for as long as this is open."""
    stream = SimpleNamespace(
        cuda_stream=1,
        wait_stream=lambda other: None,
        wait_event=lambda event: None,
        record_event=lambda: None,
    )
    fakes: dict[str, Any] = {
        "Stream": lambda device: stream,
        "current_stream": lambda device=None: stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    raw = "_cuda_getCurrentRawStream"  # a CPU build of torch has none
    with (
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch.object(torch._C, raw, return_value=1, create=True),
    ):
        yield


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """Has the ranks of the world share memory as GPUs do, for as long as this is open."""
    paths: dict[int, str] = {}

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        handle, path = tempfile.mkstemp(prefix="cuda_ops_box_")
        files.callback(os.unlink, path)
        os.truncate(handle, count)
        os.close(handle)
        box = _mapped(path, count)
        paths[box.data_ptr()] = path
        weakref.finalize(box, _spoil, path, count)
        return box

    def rendezvous(box: torch.Tensor, group: str) -> _Handle:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, paths[box.data_ptr()])
        handle = _Handle(of_ranks, box.numel())
        dist.barrier()  # all have opened them
        return handle

    with (
        without_streams(),
        contextlib.ExitStack() as files,
        mock.patch.multiple(symmetric.symm_mem, empty=empty, rendezvous=rendezvous),
        mock.patch.object(symmetric, "_could_share", return_value=True),
        mock.patch.object(symmetric, "_memories", weakref.WeakKeyDictionary()),
    ):
        yield
