"""Raises a ceiling that a measurement went above, so that no share of a ceiling exceeds 100 %.

A ceiling is the best that one kernel did, and another may do better. Then the better one is the
ceiling of that run, for every case that was held against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .results import CaseResult, Report


def kind_of(result: CaseResult) -> str:
    """Returns the ceiling that a case is held against: ``"memory"``, ``"read"``, or a kind of
    arithmetic.
    """
    return result.arithmetic if result.bound == "compute" else result.bound


def raised(report: Report) -> Report:
    """Returns the report with every ceiling at least as high as what was reached under it, and in
    :attr:`~cuda_ops.benchmarking.results.Report.raised` what raised it.

    A joined report has cases of several runs: those with equal ceilings are of one run.

    Example::

        assert all(result.of_ceiling <= 1 for result in raised(report).results)
    """
    best: dict[tuple[str, float], tuple[float, str]] = {}
    for result in report.results:
        if result.floor_seconds <= 0:
            continue
        run = _run(result)
        for name, seconds in _reached(result):
            share = result.floor_seconds / seconds
            if share > best.get(run, (1.0, ""))[0]:
                best[run] = (share, f"{result.op} {result.case} ({name})")
    if not best:
        return report
    results = [
        replace(result, floor_seconds=result.floor_seconds / best[_run(result)][0])
        if result.floor_seconds > 0 and _run(result) in best
        else result
        for result in report.results
    ]
    notes: dict[str, str] = {}
    for (kind, _), (share, by) in sorted(best.items(), key=lambda item: item[1][0]):
        notes[kind] = f"raised by {share - 1:.1%} to what {by} reached"
    return replace(report, results=_held(results), raised={**report.raised, **notes})


def _run(result: CaseResult) -> tuple[str, float]:
    """Returns the kind of a case's ceiling and its height, to six digits: equal within a run."""
    amount = result.flops if result.bound == "compute" else result.bytes
    return kind_of(result), float(f"{amount / result.floor_seconds:.6g}")


def _reached(result: CaseResult) -> Iterator[tuple[str, float]]:
    """Yields what was timed beside this ceiling: the operator, and the peers of the same run."""
    if result.seconds is not None:
        yield "cuda_ops", result.seconds.value
    for name, peer in result.peers.items():
        if peer.seconds is not None and not peer.commit:
            yield name, peer.seconds.value


def _held(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Rounds away what division left above one."""
    return [
        replace(result, floor_seconds=min(result.floor_seconds, result.seconds.value))
        if result.seconds is not None
        else result
        for result in results
    ]
