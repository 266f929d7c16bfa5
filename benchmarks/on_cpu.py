"""Measures what a CPU runs: operators' own kernels, and torch's operators in their place.

``python -m benchmarks.on_cpu [--rows 1024] [--json FILE]``, for operators with ``.cpu<f, g>()`` and
sorts, beside the function of torch that does the same. A ratio is torch's time over that of the
operator, in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import cuda_ops
from benchmarks import report
from cuda_ops.benchmarking.clock import host_latency
from cuda_ops.benchmarking.stats import median_interval, ratio_interval
from cuda_ops.dispatch import by_torch
from cuda_ops.ops import fused_linear_gelu, layer_norm, silu_and_mul
from cuda_ops.output import at_least

_CPU = torch.device("cpu")
_ROUNDS, _CALLS = 9, 3


#: Functions of torch, and the shapes of their arguments for so many rows.
CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], tuple[tuple[int, ...], ...]]]]
CASES = {
    "silu": (F.silu, lambda n: ((n, 1024),)),
    "relu": (F.relu, lambda n: ((n, 1024),)),
    "add": (torch.add, lambda n: ((n, 1024), (n, 1024))),
    "gelu_approx": (partial(F.gelu, approximate="tanh"), lambda n: ((n, 1024),)),
    "silu_and_mul": (silu_and_mul.composed, lambda n: ((n, 2048),)),
    "sum_rows": (partial(torch.sum, dim=-1), lambda n: ((n, 1024),)),
    "reduce_sum": (torch.sum, lambda n: ((n, 1024),)),
    "cumulative_sum": (partial(torch.cumsum, dim=-1), lambda n: ((n, 1024),)),
    "bitonic_sort": (lambda x: torch.sort(x).values, lambda n: ((n, 1024),)),
    "layer_norm": (layer_norm.torch_layer_norm, lambda n: ((n, 1024), (1024,), (1024,))),
    "matmul": (torch.matmul, lambda n: ((n, 512), (512, 512))),
    "fused_linear_gelu": (fused_linear_gelu.eager, lambda n: ((n, 512), (512, 512), (512,))),
}


def measure(rows: int) -> list[dict[str, Any]]:
    """Returns microseconds and ratios of each operator, in float32 and bfloat16."""
    results = []
    for name, (function, shapes) in CASES.items():
        operator = getattr(cuda_ops, name)
        for dtype in (torch.float32, torch.bfloat16):
            arguments = [torch.randn(shape).to(dtype) for shape in shapes(rows)]
            row: dict[str, Any] = {
                "op": name, "dtype": str(dtype).removeprefix("torch."),
                "by_torch": torch_has(name), "us": {}, "torch_over": {},
            }  # fmt: skip
            ways = {"torch": partial(function, *arguments), "ours": partial(operator, *arguments)}
            for way, with_torch in (("as it is", True), ("own kernel", False)):
                with by_torch.kernels(with_torch):
                    times = host_latency(ways, _CPU, rounds=_ROUNDS, calls=_CALLS)
                row["us"][way] = vars(median_interval([t * 1e6 for t in times["ours"]]))
                row["torch_over"][way] = vars(ratio_interval(times["torch"], times["ours"]))
            results.append(row)
    return results


def torch_has(name: str) -> bool:
    """Returns whether a CPU runs torch's operators in place of an operator's kernel."""
    from cuda_ops.registry import registry

    return registry().operators(name)[name].spec.by_torch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=at_least(1), default=1024)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    results = measure(arguments.rows)
    table = Table("operator", "dtype", "us", "torch / it", "own kernel us", "torch / own kernel",
                  title=f"{arguments.rows} rows, {torch.get_num_threads()} threads")  # fmt: skip
    for row in results:
        cells = (
            text
            for way in ("as it is", "own kernel")
            for text in (
                f"{row['us'][way]['value']:.0f}", f"{row['torch_over'][way]['value']:.2f}",
            )
        )  # fmt: skip
        table.add_row(row["op"], row["dtype"], *cells)
    Console().print(report.environment(), table)
    measured = {"rows": arguments.rows, "threads": torch.get_num_threads(), "cases": results}
    report.save(arguments.json, measured)


if __name__ == "__main__":
    main()
