"""Reads the runs that are committed in ``benchmarks/results``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.report import REPO
from cuda_ops.benchmarking.results import Report
from cuda_ops.ops import bitonic_sort, matmul, moe
from cuda_ops.spec import OpSpec

RESULTS = REPO / "benchmarks" / "results"
#: Where something was measured on several devices, the tables have the first.
DEVICES = ("h200", "h100")

#: Operators whose cases have groups. Runs from before that get the groups of today's cases.
_GROUPED = {"bitonic_sort": bitonic_sort, "matmul": matmul, "moe": moe}


def reports() -> dict[str, Report]:
    """Returns the committed run of each pair, by name."""
    pairs = {path.stem for path in RESULTS.glob("*/operators/*.json")}
    return {pair: grouped(Report.load(file_of(f"operators/{pair}"))) for pair in sorted(pairs)}


def grouped(report: Report) -> Report:
    """Returns the report with the groups of its cases, where a run from before they had some lacks
    them.
    """
    groups: dict[tuple[str, str], str] = {}
    for op in report.operators():
        if op in _GROUPED and not any(result.group for result in report.of(op)):
            # The cases depend on the operator's name alone.
            cases = _GROUPED[op].cuda_ops_benchmarks(cast(OpSpec, SimpleNamespace(name=op)))
            groups |= {(op, case.label): case.group for case in cases or ()}
    results = [
        replace(result, group=groups.get((result.op, result.case), result.group))
        for result in report.results
    ]
    return replace(report, results=results)


def file_of(name: str) -> Path:
    files = [RESULTS / device / f"{name}.json" for device in (*DEVICES, "cpu")]
    return next((file for file in files if file.exists()), files[0])


def json_of(name: str) -> Any:
    return json.loads(file_of(name).read_text(encoding="utf-8"))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
