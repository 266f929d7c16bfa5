"""Counts memory by region and by operator, and proves that a step keeps none.

python examples/runtime/memory_by_region.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import cuda_ops
from cuda_ops.runtime import (
    assert_no_growth,
    memory_by_operator,
    memory_report,
    record_memory,
    region,
)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = torch.randn(256, 256, device=device, requires_grad=True)
    x = torch.randn(1024, 256, device=device)

    def step() -> None:
        with region("forward"):
            loss = cuda_ops.silu(x @ weight).square().mean()
        with region("backward"):
            loss.backward()

    with memory_by_operator() as operators, region("step"):
        step()
    print(memory_report(device, operators))

    # The first step made weight.grad, which the others add to.
    with assert_no_growth(device=device, warm=step):
        step()
    print("a step keeps no memory")

    kept = []
    try:
        with assert_no_growth(device=device), region("cache"):
            kept.append(x + 1)
    except AssertionError as error:
        print("found:", error)

    if device.type == "cuda":
        with record_memory(Path(tempfile.gettempdir()) / "memory.pickle") as file:
            step()
        print(f"open {file} at pytorch.org/memory_viz")


if __name__ == "__main__":
    main()
