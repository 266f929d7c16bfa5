"""Measures the host latency of small eager calls: ``cuda_ops.silu`` beside ``F.silu`` in each mode
of autograd, and other operators beside what torch has, under ``no_grad``.

``python -m benchmarks.call_overhead [--numel 1024] [--json FILE]``
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import cuda_ops
from benchmarks import report
from cuda_ops.benchmarking.clock import host_latency
from cuda_ops.ops._moe import torch_route
from cuda_ops.output import at_least

#: The ratio to F.silu that must hold, and the goal.
LIMITS = {"grad mode": (1.25, 1.10), "no_grad": (1.25, 1.10), "inference_mode": (1.25, 1.10),
          "requires_grad": (4.0, 2.0)}  # fmt: skip
_CONTEXTS = {
    "grad mode": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "requires_grad": contextlib.nullcontext,
}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(numel: int, rounds: int = 30, calls: int = 500) -> list[dict[str, Any]]:
    """Returns medians over rounds in turns, for each autograd mode: microseconds, and the ratio."""
    functions = {
        "F.silu": F.silu,
        "cuda_ops.silu": cuda_ops.silu,
        "torch.ops.cuda_ops.silu": torch.ops.cuda_ops.silu,
    }
    results = []
    for mode, context in _CONTEXTS.items():
        with context():
            x = torch.randn(numel, device=_device(), requires_grad=mode == "requires_grad")
            thunks = {name: partial(function, x) for name, function in functions.items()}
            results.append(
                {"mode": mode}
                | _medians(thunks, "cuda_ops.silu", "F.silu", rounds=rounds, calls=calls)
            )
    return results


def _medians(
    thunks: Mapping[str, Callable[[], Any]], ours: str, theirs: str, **counts: int
) -> dict[str, Any]:
    """Returns microseconds by name, and the ratio of two: medians over rounds in turns."""
    times = host_latency(thunks, _device(), **counts)
    ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
    us = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    return {"microseconds": us, "ratio": statistics.median(ratios)}


def _of_operators(device: torch.device) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Returns calls whose kernels take no time to speak of, by operator: ours, and torch's."""
    made = partial(torch.randn, device=device)
    x, residual, weight, bias = made(4, 64), made(4, 64), made(64, 64), made(64)
    xs, ys = ([made(64) for _ in range(8)] for _ in range(2))
    heads, cos, sin = made(1, 4, 2, 16), made(4, 8), made(4, 8)
    logits, gate_up, down = made(1, 8), made(8, 32, 64), made(8, 64, 16)
    row = x[:1]

    def norm_of_sum() -> None:
        residual.add_(x)
        F.rms_norm(residual, (64,), bias, 1e-6)

    def rotated() -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    def mixture() -> torch.Tensor:
        scores, chosen = torch_route(logits, 2)
        gate, up = (gate_up[chosen[0]] @ row[0]).chunk(2, -1)
        rows = torch.bmm(down[chosen[0]], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (scores.T * rows).sum(0, keepdim=True)

    return {
        "add_rms_norm_": (
            lambda: cuda_ops.add_rms_norm_(x, residual, bias, 1e-6), norm_of_sum,
        ),
        "foreach_axpy_": (
            lambda: cuda_ops.foreach_axpy_(xs, ys, 0.5),
            lambda: torch._foreach_add_(ys, xs, alpha=0.5),
        ),
        "fused_linear_gelu": (
            lambda: cuda_ops.fused_linear_gelu(x, weight, bias),
            lambda: F.gelu(F.linear(x, weight, bias), approximate="tanh"),
        ),
        "matmul": (lambda: cuda_ops.matmul(x, weight), lambda: torch.matmul(x, weight)),
        "moe, one token": (lambda: cuda_ops.moe(row, logits, gate_up, down, 2), mixture),
        "moe_route": (lambda: cuda_ops.moe_route(logits, 2), lambda: torch_route(logits, 2)),
        "reduce_sum": (lambda: cuda_ops.reduce_sum(x), lambda: torch.sum(x)),
        "rms_norm": (
            lambda: cuda_ops.rms_norm(x, bias, 1e-6), lambda: F.rms_norm(x, (64,), bias, 1e-6),
        ),
        "rotary_embedding": (
            lambda: cuda_ops.rotary_embedding(heads, cos, sin), rotated,
        ),
    }  # fmt: skip


def measure_operators(rounds: int = 30, calls: int = 200) -> list[dict[str, Any]]:
    """Returns medians over rounds in turns, by operator: microseconds, and ours over torch's."""
    results = []
    with torch.no_grad():
        for operator, (ours, theirs) in _of_operators(_device()).items():
            thunks = {"cuda_ops": ours, "torch": theirs}
            results.append(
                {"operator": operator}
                | _medians(thunks, "cuda_ops", "torch", rounds=rounds, calls=calls)
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=at_least(1), default=1024)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    results = measure(arguments.numel)
    grid = Table("mode", "F.silu us", "cuda_ops.silu us", "torch.ops us", "ratio", "floor", "goal")
    for result in results:
        us, (floor, goal) = result["microseconds"], LIMITS[result["mode"]]
        grid.add_row(result["mode"], *(f"{us[name]:.2f}" for name in us),
                     f"{result['ratio']:.2f}", f"{floor}", f"{goal}")  # fmt: skip
    operators = measure_operators()
    others = Table("operator", "cuda_ops us", "torch us", "ratio")
    for result in operators:
        us = result["microseconds"]
        others.add_row(result["operator"], f"{us['cuda_ops']:.2f}", f"{us['torch']:.2f}",
                       f"{result['ratio']:.2f}")  # fmt: skip
    Console().print(report.environment(), grid, others)
    report.save(arguments.json, results + operators)


if __name__ == "__main__":
    main()
