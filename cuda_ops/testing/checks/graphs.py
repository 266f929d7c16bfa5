"""Class 10: what a CUDA graph cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from cuda_ops.testing.case import Case, check
from cuda_ops.testing.draw import Draw


@check("graphs", 10, "not CUDA-graph safe", Draw(2, range(1, 4097)), devices=("cuda",))
def graphs(case: Case) -> None:
    """Captures a call once and replays it with other values in the same memory. The call must not
    synchronize.
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
    for output in captured:
        output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    case.same(captured, expected, "a replay with new values")


@contextmanager
def _no_synchronization() -> Iterator[None]:
    """Makes synchronization through torch an error; any other fails in the capture."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
