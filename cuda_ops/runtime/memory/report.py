"""What memory is used for: a report in plain words, and snapshots for torch's viewer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cuda_ops.output import size_text, table_lines
from cuda_ops.runtime.memory.operators import OperatorsUse
from cuda_ops.runtime.memory.regions import (
    RegionUse,
    counted_device,
    peak_of,
    process_memory,
    regions,
)


@dataclass(frozen=True)
class PoolUse:
    """A private pool of torch's allocator, such as that of a CUDA graph."""

    #: torch's number of the pool.
    id: tuple[int, int]
    reserved: int
    allocated: int
    segments: int


@dataclass(frozen=True)
class Segments:
    """What the allocator's segments say; free blocks of private pools serve nothing else."""

    count: int
    #: Bytes of free blocks that share a segment with blocks in use: they cannot be given back.
    inactive_split: int
    #: The largest free block that any allocation of its size can get, in bytes.
    largest_free: int
    pools: tuple[PoolUse, ...]


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one device now, in bytes; ``None`` for what is not known there."""

    device: str
    #: Where the numbers are from.
    source: str
    #: In use by tensors; on a CPU: by the C library's heap, Python included.
    allocated: int
    #: Held by the allocator; on a CPU: the resident set.
    reserved: int
    #: The most that was in use at once; on a CPU: the largest resident set.
    peak: int
    #: Free and total memory of the device, as its driver says.
    device_free: int | None = None
    device_total: int | None = None
    segments: Segments | None = None
    #: Allocations that had to empty the cache first, and those that failed.
    retries: int | None = None
    failures: int | None = None
    regions: tuple[RegionUse, ...] = ()
    operators: OperatorsUse = field(default_factory=OperatorsUse)

    @property
    def fragmentation(self) -> float | None:
        """The share of what is reserved that lies idle between blocks in use, from 0 to 1."""
        if self.segments is None:
            return None
        return self.segments.inactive_split / self.reserved if self.reserved else 0.0

    def __str__(self) -> str:
        lines = [f"memory of {self.device}, by {self.source}"]
        on_cuda = self.device.startswith("cuda")
        of = "tensors" if on_cuda else "the heap"
        lines.append(f"  in use by {of}: {size_text(self.allocated)}")
        held = "held by the allocator" if on_cuda else "resident"
        lines.append(f"  {held}: {size_text(self.reserved)}")
        lines.append(f"  most {'in use' if on_cuda else 'resident'}: {size_text(self.peak)}")
        if self.device_free is not None and self.device_total is not None:
            other = max(0, self.device_total - self.device_free - self.reserved)
            lines.append(
                f"  free on the device: {size_text(self.device_free)} of "
                f"{size_text(self.device_total)}; contexts, libraries and other processes: "
                f"{size_text(other)}"
            )
        if self.segments is not None and self.fragmentation is not None:
            lines.append(
                f"  idle between blocks in use: {size_text(self.segments.inactive_split)}, "
                f"{self.fragmentation:.0%} of what is held; largest free block: "
                f"{size_text(self.segments.largest_free)}; {self.segments.count} segments"
            )
            lines += [
                f"  private pool {pool.id}: {size_text(pool.reserved)} held, "
                f"{size_text(pool.allocated)} in use, {pool.segments} segments"
                for pool in self.segments.pools
            ]
        elif on_cuda:
            lines.append("  segments and fragmentation: unknown, this backend does not tell")
        if self.retries or self.failures:
            lines.append(
                f"  allocations that emptied the cache first: {self.retries or 0}; that failed: "
                f"{self.failures or 0}"
            )
        if self.regions:
            header = ("region", "runs", "allocated", "left", "peak")
            rows = [
                (use.name, str(use.runs), *map(size_text, (use.allocated, use.left, use.peak)))
                for use in self.regions
            ]
            lines += ["", *table_lines(header, rows)]
        if len(self.operators):
            lines += ["", str(self.operators)]
        return "\n".join(lines)


def memory_report(
    device: torch.device | str | None = None, operators: OperatorsUse | None = None
) -> MemoryReport:
    """Reports what is allocated, reserved and fragmented on a device, by region and operator.

    On a CPU torch counts nothing, so the numbers are those of the process.

    >>> report = memory_report("cpu")
    >>> report.device, 0 < report.reserved <= report.peak, report.fragmentation
    ('cpu', True, None)

    Args:
        device: a CPU or CUDA device; by default the current GPU, or the CPU where there is none.
        operators: what :func:`memory_by_operator` found, to be part of the report.

    Raises:
        TypeError: ``operators`` is something else.
        ValueError: ``device`` is neither a CPU nor a GPU of this machine.
    """
    where = counted_device("memory_report", device)
    found = OperatorsUse() if operators is None else operators
    if not isinstance(found, OperatorsUse):
        raise TypeError(
            "memory_report: argument 'operators': expected what memory_by_operator found, got "
            f"{type(found).__name__}"
        )
    if where.type == "cpu":
        now = process_memory()
        return MemoryReport(
            "cpu", "the C library's heap and the process's resident set, Python's memory included",
            now["used"], now["resident"], max(now["largest"], now["resident"]),
            regions=regions(where), operators=found,
        )  # fmt: skip
    stats: Mapping[str, Any] = torch.cuda.memory_stats(where)
    backend = torch.cuda.get_allocator_backend()
    segments = None
    if backend == "native":
        here = [s for s in torch.cuda.memory_snapshot() if s.get("device", 0) == where.index]
        segments = read_segments(here)
    free, total = torch.cuda.mem_get_info(where)
    return MemoryReport(
        str(where), f"torch's caching allocator, backend {backend}",
        stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0),
        peak_of(where), free, total, segments, stats.get("num_alloc_retries"),
        stats.get("num_ooms"), regions(where), found,
    )  # fmt: skip


def read_segments(segments: Iterable[Mapping[str, Any]]) -> Segments:
    """Sums up the segments of ``torch.cuda.memory_snapshot()``, those of one device.

    >>> block = {"size": 512, "state": "inactive"}
    >>> used = {"size": 1024, "state": "active_allocated"}
    >>> segment = {"total_size": 1536, "allocated_size": 1024, "segment_pool_id": (0, 0)}
    >>> read_segments([{**segment, "blocks": [used, block]}]).inactive_split
    512
    """
    count = split = largest = 0
    pools: dict[tuple[int, int], PoolUse] = {}
    for segment in segments:
        count += 1
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if len(free) < len(segment["blocks"]):
            split += sum(free)
        pool = tuple(segment.get("segment_pool_id", (0, 0)))
        if pool == (0, 0):
            largest = max(largest, *free, 0)
            continue
        before = pools.get(pool, PoolUse(pool, 0, 0, 0))
        pools[pool] = PoolUse(
            pool, before.reserved + segment["total_size"],
            before.allocated + segment["allocated_size"], before.segments + 1,
        )  # fmt: skip
    return Segments(count, split, largest, tuple(pools[id_] for id_ in sorted(pools)))


# --- text -----------------------------------------------------------------------------
