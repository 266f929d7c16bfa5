"""Collectives of torch.distributed by the names that the present torch has for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 warns of the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the rows of all ranks, (ranks * n, ...) for (n, ...) at each, one after the other."""
    count = dist.get_world_size(group) * rows.shape[0]
    found = rows.new_empty(count, *rows.shape[1:])
    _all_gather(found, rows.contiguous(), group=group)
    return found
