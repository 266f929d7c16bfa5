"""Settings of the knobs that several bindings have, and the use of what was chosen before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from cuda_ops.spec import OpSpec

#: How many blocks a row is split among, for a multiprocessor, where there are few rows.
BLOCKS: Mapping[str, Mapping[str, int]] = {
    f"{count} blocks per SM": {"blocks_per_sm": count} for count in (4, 16, 32)
}
#: And how little of a row a thread may get.
SUMS: Mapping[str, Mapping[str, int]] = {
    **BLOCKS,
    **{f"splits of {size} bytes": {"split_bytes": size} for size in (32, 128, 256)},
    "16 blocks per SM, splits of 32 bytes": {"blocks_per_sm": 16, "split_bytes": 32},
}


def use_stored(op: OpSpec, library: Path) -> None:
    """Sets the knobs of a library that was just loaded to what tuning has chosen before."""
    from cuda_ops.runtime.tuning.search import use_stored

    use_stored(op, library)


def row_sizes(x: torch.Tensor) -> tuple[int, int] | None:
    """Returns how many rows there are, and their length: the last dim; ``None`` without one."""
    n = x.size(-1) if x.dim() else 0
    return (x.numel() // n, n) if n else None
