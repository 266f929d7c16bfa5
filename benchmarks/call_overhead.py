"""Host latency of one small eager call: ``cuda_ops.silu`` against ``F.silu``, side by side.

``python -m benchmarks.call_overhead [--numel 1024] [--json FILE]``
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import cuda_ops
from benchmarks import report

#: Ratio to F.silu that must hold, and the one aimed at.
LIMITS = {"grad mode": (1.25, 1.10), "no_grad": (1.25, 1.10), "inference_mode": (1.25, 1.10),
          "requires_grad": (4.0, 2.0)}  # fmt: skip


def latency(function: Callable[[torch.Tensor], Any], x: torch.Tensor, calls: int) -> float:
    """Microseconds per call; the device is drained before and after, outside of the clock."""
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function(x)
    elapsed = time.perf_counter() - start
    if x.is_cuda:
        torch.cuda.synchronize()
    return elapsed / calls * 1e6


def measure(numel: int, rounds: int = 30, calls: int = 500) -> list[dict[str, Any]]:
    """Median over interleaved rounds, for each autograd mode."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    functions = {
        "F.silu": F.silu,
        "cuda_ops.silu": cuda_ops.silu,
        "torch.ops.cuda_ops.silu": torch.ops.cuda_ops.silu,
    }
    results = []
    for mode, context in (
        ("grad mode", contextlib.nullcontext),
        ("no_grad", torch.no_grad),
        ("inference_mode", torch.inference_mode),
        ("requires_grad", contextlib.nullcontext),
    ):
        with context():
            x = torch.randn(numel, device=device, requires_grad=mode == "requires_grad")
            times: dict[str, list[float]] = {name: [] for name in functions}
            for round_ in range(rounds + 3):
                order = list(functions)[round_ % 3 :] + list(functions)[: round_ % 3]
                for name in order:
                    taken = latency(functions[name], x, calls)
                    if round_ >= 3:  # the first rounds warm up
                        times[name].append(taken)
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = [
            ours / theirs
            for ours, theirs in zip(times["cuda_ops.silu"], times["F.silu"], strict=True)
        ]
        results.append({"mode": mode, "microseconds": medians, "ratio": statistics.median(ratios)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=1024)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    results = measure(arguments.numel)
    grid = Table("mode", "F.silu us", "cuda_ops.silu us", "torch.ops us", "ratio", "floor", "goal")
    for result in results:
        us, (floor, goal) = result["microseconds"], LIMITS[result["mode"]]
        grid.add_row(result["mode"], *(f"{us[name]:.2f}" for name in us),
                     f"{result['ratio']:.2f}", f"{floor}", f"{goal}")  # fmt: skip
    Console().print(report.environment(), grid)
    report.save(arguments.json, results)


if __name__ == "__main__":
    main()
