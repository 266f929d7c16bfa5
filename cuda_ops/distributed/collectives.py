"""Collectives of torch.distributed by the names that the present torch has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 warns of the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Wait = Callable[[], list[torch.Tensor]]


def all_gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the rows of all ranks, (ranks * n, ...) for (n, ...) at each, one after the other."""
    return _begun(rows, group)()


class Collectives:
    """Sends rows by torch.distributed, beside what is done until a wait."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def begin_all_gather(
        self, parts: Sequence[torch.Tensor], most: int, chunk: int = 0, aside: bool = False
    ) -> Wait:
        """Begins :func:`all_gather` of tensors, each filled up to ``most`` rows; returns what has
        the current stream wait for the results. Chunks need no turns, and torch.distributed sends
        on a stream of its own.
        """
        return _all_awaited([_begun(filled(part, most), self._group) for part in parts])

    def begin_all_to_all(
        self, parts: Sequence[torch.Tensor], chunk: int = 0, aside: bool = False
    ) -> Wait:
        """Sends each rank its share of the rows, all of one size; returns what has the current
        stream wait for what this rank gets, by rank.
        """
        waits = []
        for part in parts:
            found = torch.empty_like(part, memory_format=torch.contiguous_format)
            work = dist.all_to_all_single(
                found, part.contiguous(), group=self._group, async_op=True
            )
            waits.append(_awaited(found, work))
        return _all_awaited(waits)


def filled(rows: torch.Tensor, count: int, value: int = 0) -> torch.Tensor:
    """Returns ``count`` rows, those beyond the ones that are there of one value."""
    if rows.shape[0] == count:
        return rows
    return torch.cat([rows, rows.new_full((count - rows.shape[0], *rows.shape[1:]), value)])


def _begun(rows: torch.Tensor, group: Any) -> Callable[[], torch.Tensor]:
    count = dist.get_world_size(group) * rows.shape[0]
    found = rows.new_empty(count, *rows.shape[1:])
    return _awaited(found, _all_gather(found, rows.contiguous(), group=group, async_op=True))


def _awaited(found: torch.Tensor, work: Any) -> Callable[[], torch.Tensor]:
    def wait() -> torch.Tensor:
        work.wait()
        return found

    return wait


def _all_awaited(waits: Sequence[Callable[[], torch.Tensor]]) -> Wait:
    return lambda: [wait() for wait in waits]
