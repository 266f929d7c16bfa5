"""Times ``cuda_ops.moe`` beside its products alone, as cuBLAS computes them if all experts have
equally many tokens: the time of a mixture if routing, gathers, SwiGLU and sums took none.

``python -m benchmarks.dense_experts [--tokens 4096 16384] [--json FILE]``. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cuda_ops
from benchmarks import report
from cuda_ops.benchmarking.clock import make_clock, rotated
from cuda_ops.ops.moe import MODELS, grouped_mm
from cuda_ops.output import at_least

_ROUNDS = 9

Call = Callable[[], Any]


def calls(sizes: tuple[int, int, int, int], tokens: int, backward: bool) -> dict[str, Call]:
    """Returns the mixture, the composition that users write, and the products: six, or two without
    backward.
    """
    hidden, inner, count, top_k = sizes
    rows = tokens * top_k // count

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    logits = torch.randn(tokens, count, device="cuda")
    w_gate_up = normal(count, 2 * inner, hidden) * hidden**-0.5
    w_down = normal(count, hidden, inner) * inner**-0.5
    arguments = [normal(tokens, hidden), logits, w_gate_up, w_down]
    grad = normal(tokens, hidden)
    x, a, gate_up = normal(count, rows, hidden), normal(count, rows, inner), None
    if backward:
        gate_up = normal(count, rows, 2 * inner)

    def products() -> None:
        torch.bmm(x, w_gate_up.mT)
        torch.bmm(a, w_down.mT)
        if gate_up is None:
            return
        torch.bmm(x, w_down)
        torch.bmm(x.mT, a)
        torch.bmm(gate_up, w_gate_up)
        torch.bmm(gate_up.mT, x)

    def mixture(function: Callable[..., torch.Tensor]) -> Call:
        if not backward:
            return lambda: function(*arguments, top_k)
        leaves = [t.detach().requires_grad_() for t in arguments]
        return lambda: torch.autograd.grad(function(*leaves, top_k), leaves, grad)

    return {
        "cuda_ops.moe": mixture(cuda_ops.moe),
        "grouped_mm": mixture(grouped_mm),
        "torch.bmm": products,
    }


def measure(sizes: tuple[int, int, int, int], tokens: int, backward: bool) -> dict[str, float]:
    """Returns the median seconds of each, timed in turns."""
    clock = make_clock(torch.device("cuda"))
    functions = calls(sizes, tokens, backward)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-2, _ROUNDS):
        for name in rotated(list(functions), turn):
            train = clock.train(functions[name], [()])
            if turn >= 0:
                times[name].append(train.seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=at_least(1), nargs="+", default=[4096, 16384])
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.dense_experts: there is no CUDA GPU here")
    grid = Table("case", "moe ms", "bmm ms", "bmm / moe", "grouped_mm / moe", "grouped_mm / bmm")
    results = []
    steps = [(tokens, False) for tokens in arguments.tokens] + [(8192, True)]
    for model, sizes in MODELS.items():
        for tokens, backward in steps:
            seconds = measure(sizes, tokens, backward)
            torch.cuda.empty_cache()
            case = f"{model}, T={tokens}" + (", forward and backward" if backward else "")
            results.append({"case": case, "seconds": seconds})
            ours, theirs, products = (
                seconds[name] for name in ("cuda_ops.moe", "grouped_mm", "torch.bmm")
            )
            figures = products / ours, theirs / ours, theirs / products
            grid.add_row(
                case, f"{ours * 1e3:.3f}", f"{products * 1e3:.3f}", *(f"{f:.2f}" for f in figures)
            )
    Console().print(report.environment(), grid)
    report.save(arguments.json, results)


if __name__ == "__main__":
    main()
