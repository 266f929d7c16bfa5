"""Measures the host latency of one small eager call, ``cuda_ops.silu`` beside ``F.silu``.

``python -m benchmarks.call_overhead [--numel 1024] [--json FILE]``
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import cuda_ops
from benchmarks import report
from cuda_ops.benchmarking.clock import host_latency

#: The ratio to F.silu that must hold, and the goal.
LIMITS = {"grad mode": (1.25, 1.10), "no_grad": (1.25, 1.10), "inference_mode": (1.25, 1.10),
          "requires_grad": (4.0, 2.0)}  # fmt: skip
_CONTEXTS = {
    "grad mode": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "requires_grad": contextlib.nullcontext,
}


def measure(numel: int, rounds: int = 30, calls: int = 500) -> list[dict[str, Any]]:
    """Returns medians over rounds in turns, for each autograd mode: microseconds, and the ratio."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    functions = {
        "F.silu": F.silu,
        "cuda_ops.silu": cuda_ops.silu,
        "torch.ops.cuda_ops.silu": torch.ops.cuda_ops.silu,
    }
    results = []
    for mode, context in _CONTEXTS.items():
        with context():
            x = torch.randn(numel, device=device, requires_grad=mode == "requires_grad")
            thunks = {name: partial(function, x) for name, function in functions.items()}
            times = host_latency(thunks, device, rounds=rounds, calls=calls)
        ratios = [
            ours / theirs
            for ours, theirs in zip(times["cuda_ops.silu"], times["F.silu"], strict=True)
        ]
        us = {name: statistics.median(values) * 1e6 for name, values in times.items()}
        results.append({"mode": mode, "microseconds": us, "ratio": statistics.median(ratios)})
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
