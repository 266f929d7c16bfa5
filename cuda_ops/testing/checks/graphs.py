"""Class 10: what a CUDA graph cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from cuda_ops.testing.case import Case, called, check
from cuda_ops.testing.draw import Draw, follows_line
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import ROWS, resized, shaped


@check("graphs", 10, "not CUDA-graph safe", Draw(2, range(1, 4097)), devices=("cuda",))
def graphs(case: Case) -> None:
    """Captures a call once and replays it twice with other values in the same memory, the second
    time after a larger call and beside memory that others have taken since: what the operator keeps
    for itself must still be there. The call must not synchronize.
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
    _replay(case, graph, captured, expected, "a replay with new values")
    larger = _larger(case)
    torch.cuda.empty_cache()
    if larger is not None:
        called(case, larger.make(case.device))
    torch.cuda.synchronize()
    taken = _all_free(case.device)
    _replay(case, graph, captured, expected, "a replay after a larger call")
    assert bool((torch.cat(taken) == _BYTE).all()), (
        "a replay after a larger call writes memory that is no more the operator's: what a graph "
        "uses must be allocated in the capture, or never be freed"
    )


#: The outermost dim of a larger call than any of the checks before, and most elements.
_ROWS, _MOST = 1 << 18, 1 << 24
#: The least that the caching allocator takes from each of its pools, what to write there, and how
#: many blocks to take at most.
_LEAST, _BYTE, _MOST_BLOCKS = (512, (1 << 20) + 512), 0x2A, 1 << 14


def _all_free(device: str) -> list[torch.Tensor]:
    """Returns tensors that take all memory which the caching allocator has at hand."""
    taken: list[torch.Tensor] = []
    for size in _LEAST:
        reserved = torch.cuda.memory_reserved(device)
        for _ in range(_MOST_BLOCKS):
            taken.append(torch.full((size,), _BYTE, dtype=torch.uint8, device=device))
            if torch.cuda.memory_reserved(device) > reserved:
                break
    return taken


def _replay(
    case: Case, graph: torch.cuda.CUDAGraph, captured: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor], what: str,
) -> None:  # fmt: skip
    for output in captured:
        output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    case.same(captured, expected, what)


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
