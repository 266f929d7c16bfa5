"""Class 10: what a CUDA graph cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from cuda_ops.testing.allocations import Allocation, bytes_at
from cuda_ops.testing.case import Case, called, check
from cuda_ops.testing.draw import Draw, follows_line
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import ROWS, resized, shaped


@check("graphs", 10, "not CUDA-graph safe", Draw(2, range(1, 4097)), devices=("cuda",))
def graphs(case: Case) -> None:
    """Captures a call once and replays it twice with other values in the same memory, the second
    time after a larger call whose freed memory others have taken: what the operator keeps for
    itself must still be there. The call must not synchronize.
    """
    static = case.arguments()
    with _no_synchronization():
        case.call(*static)  # warm: libraries load, workspaces are made
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.call(*static)
    other = replace(case.sample, seed=case.sample.seed + 1).make(case.device)
    expected = case.call(*other)
    for place, value in zip(static, other, strict=True):
        if isinstance(value, torch.Tensor):
            place.copy_(value)
    _replay(graph, captured)
    case.same(captured, expected, "a replay with new values")
    larger = _larger(case)
    before = _blocks()
    if larger is not None:
        called(case, larger.make(case.device))
    torch.cuda.synchronize()
    freed = _freed_since(before)
    taken = [bytes_at(one.address, one.size, case.device).fill_(_BYTE) for one in freed]
    _replay(graph, captured)
    # Read on the CPU, before anything is allocated: for the allocator this memory is free.
    assert all(bool((block.cpu() == _BYTE).all()) for block in taken), (
        "a replay after a larger call writes memory that is no more the operator's: what a graph "
        "uses must be allocated in the capture, or never be freed"
    )
    case.same(captured, expected, "a replay after a larger call")


#: The outermost dim of a larger call than any of the checks before, and most elements.
_ROWS, _MOST = 1 << 18, 1 << 24
#: What others write to memory that they take.
_BYTE = 0x2A


def _blocks() -> dict[Allocation, bool]:
    """Returns all memory of the caching allocator, block by block, and which of it is in use."""
    found = {}
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            found[Allocation(address, block["size"])] = block["state"] != "inactive"
            address += block["size"]
    return found


def _freed_since(before: dict[Allocation, bool]) -> list[Allocation]:
    """Returns the blocks that were in use and are free: not taken by looking for them with new
    tensors, which find only the memory of their own stream.
    """
    free = [block for block, used in _blocks().items() if not used]
    return [
        block
        for block, used in before.items()
        if used and any(at.address <= block.address and block.end <= at.end for at in free)
    ]


def _replay(graph: torch.cuda.CUDAGraph, captured: Sequence[torch.Tensor]) -> None:
    for output in captured:
        output.zero_()
    graph.replay()
    torch.cuda.synchronize()


def _larger(case: Case) -> Sample | None:
    """Returns a call of more elements."""
    op = case.subject.op
    if not follows_line(case.subject):
        return resized(op, case.sample, ROWS, _ROWS)
    sizes = (shaped(op, (_ROWS,), core=core) for core in (8, 2))
    return next((sample for sample in sizes if sample.numel <= _MOST), None)


@contextmanager
def _no_synchronization() -> Iterator[None]:
    """Makes synchronization through torch an error; any other fails in the capture."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
