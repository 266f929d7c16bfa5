"""Reports of benchmarks, made up for tests of what becomes of them."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from cuda_ops.benchmarking.results import CaseResult, PeerResult, Report
from cuda_ops.benchmarking.stats import Interval
from cuda_ops.benchmarking.table import render


def result(op: str = "f", case: str = "1K", us: float = 10.0, **more: Any) -> CaseResult:
    values: dict[str, Any] = {
        "pair": op, "reason": "small", "dtype": "float32", "bytes": 2**20, "flops": 0,
        "arithmetic": "fp32", "seconds": around(us * 1e-6), "floor_seconds": 5e-6,
        "bound": "memory", "calls": 2, "rounds": 9, "converged": True,
        "peers": {"eager": PeerResult(around(2 * us * 1e-6), around(2.0))},
    }  # fmt: skip
    return CaseResult(op, case=case, **{**values, **more})


def around(value: float, width: float = 0.01) -> Interval:
    return Interval(value, value * (1 - width), value * (1 + width))


def report(*results: CaseResult, device: str = "NVIDIA H200", **more: Any) -> Report:
    known = {"device": device, "driver": "1", "torch": "2", "date": "2026-01-01", "commit": "abc"}
    ceilings = {"memory": around(4e12), "fp32": around(5e13)}
    settings = {"precision": 0.01, "seconds": 3.0}
    return Report(known, ceilings, {}, 1.3, settings, list(results), **more)


def rendered(report: Report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(report))
    console.file.close()
    return console.export_text()
