"""Collectives of torch.distributed by the names that the present torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 warns of the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the rows of all ranks, (ranks * n, ...) for (n, ...) at each, one after the other."""
    return begin_all_gather(rows, group)()


def begin_all_gather(rows: torch.Tensor, group: Any) -> Callable[[], torch.Tensor]:
    """Begins :func:`all_gather`, and returns what has the current stream wait for the result."""
    count = dist.get_world_size(group) * rows.shape[0]
    found = rows.new_empty(count, *rows.shape[1:])
    return _awaited(found, _all_gather(found, rows.contiguous(), group=group, async_op=True))


def begin_all_to_all(rows: torch.Tensor, group: Any) -> Callable[[], torch.Tensor]:
    """Sends each rank its part of the rows, all of one size; returns what has the current stream
    wait for what this rank got, by rank.
    """
    found = torch.empty_like(rows, memory_format=torch.contiguous_format)
    work = dist.all_to_all_single(found, rows.contiguous(), group=group, async_op=True)
    return _awaited(found, work)


def _awaited(found: torch.Tensor, work: Any) -> Callable[[], torch.Tensor]:
    def wait() -> torch.Tensor:
        work.wait()
        return found

    return wait
