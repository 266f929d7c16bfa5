"""Finds the cases that became slower than in an earlier run, beyond noise."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cuda_ops.errors import BenchmarkError
from cuda_ops.output import time_text

from .environment import DEBUG_BUILD
from .results import CaseResult, Report
from .stats import Interval

#: Two runs of the same code differ by this much, which the intervals of one run do not show.
BETWEEN_RUNS = 0.03


@dataclass(frozen=True)
class Regression:
    """A case that became slower; prints as one line with both times."""

    op: str
    case: str
    before: Interval
    after: Interval

    def __str__(self) -> str:
        change = self.after.value / self.before.value - 1
        return (
            f"{self.op} {self.case}: {_text(self.before)} before, {_text(self.after)} now "
            f"({change:+.0%})"
        )


def regressions(before: Report, now: Report) -> list[Regression]:
    """Returns the cases whose later interval lies above the earlier one by more than
    :data:`BETWEEN_RUNS`.

    Raises:
        BenchmarkError: the runs are from different devices, only one has clean caches, one is of
            debug builds, they have no case in common, or the later run failed at a case or lost one
            that the earlier one had. A case that was itself left out, as too large for the free
            memory, is not lost; one whose operator or pair was left out is.

    Example::

        slower = regressions(Report.load(Path("before.json")), Report.load(Path("now.json")))
    """
    devices = [report.environment.get("device", "unknown") for report in (before, now)]
    if devices[0] != devices[1]:
        raise BenchmarkError(
            f"cannot compare: the base was measured on {devices[0]}, this run on {devices[1]}"
        )
    for what, report in (("the base", before), ("this run", now)):
        if debugged := report.environment.get(DEBUG_BUILD):
            raise BenchmarkError(f"cannot compare: {what} is of a debug build of {debugged}")
    if before.settings.get("clean_caches", False) != now.settings.get("clean_caches", False):
        raise BenchmarkError("cannot compare: one of the runs was made with --clean-caches")
    base, current = _timed(before.results), _timed(now.results)
    common = [key for key in base if key in current]
    if not common:
        raise BenchmarkError("cannot compare: no case is in both runs")
    # Only among what this run was asked for: an operator that is gone belongs to such a pair.
    asked = {result.pair for result in now.results} | now.left_out.keys()
    lost = [
        f"{result.op} {result.case}"
        for result in before.results
        if (result.op, result.case) in base.keys() - current.keys()
        and re.search(now.settings.get("cases", ""), result.case)
        and asked & {result.pair, result.op}
        and f"{result.op} {result.case}" not in now.left_out
    ]
    if lost:
        raise BenchmarkError(f"cannot compare: measured before and not now: {', '.join(lost)}")
    found = (Regression(*key, base[key], current[key]) for key in common)
    return [r for r in found if r.after.low > r.before.high * (1 + BETWEEN_RUNS)]


def _timed(results: Iterable[CaseResult]) -> dict[tuple[str, str], Interval]:
    return {(r.op, r.case): r.seconds for r in results if r.seconds is not None}


def _text(interval: Interval) -> str:
    return f"{time_text(interval.value)} ({time_text(interval.low)} to {time_text(interval.high)})"
