"""Finds a tensor that a stream reads before the other stream has written it.

The first function forgets to wait, the second one does not. Run it on a GPU to see the report;
without one it says that nothing was checked.
"""

from __future__ import annotations

import contextlib

import torch

import cuda_ops
from cuda_ops.runtime import check_streams

GPU = torch.cuda.is_available()
SIDE = torch.cuda.Stream() if GPU else None


def on_the_side() -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(SIDE) if SIDE else contextlib.nullcontext()


def forgets(x: torch.Tensor) -> torch.Tensor:
    y = cuda_ops.silu(x)
    with on_the_side():
        return cuda_ops.relu(y)


def waits(x: torch.Tensor) -> torch.Tensor:
    y = cuda_ops.silu(x)
    if SIDE:
        SIDE.wait_stream(torch.cuda.current_stream())
    with on_the_side():
        z = cuda_ops.relu(y)
    if SIDE:
        torch.cuda.current_stream().wait_stream(SIDE)
    return z


x = torch.randn(1 << 16, device="cuda" if GPU else "cpu")
for step in (forgets, waits):
    with check_streams(raise_errors=False) as found:
        step(x)
    print(f"{step.__name__}: {found}")
    assert bool(found.races) == (GPU and step is forgets)
