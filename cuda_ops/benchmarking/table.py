"""Tables for the terminal, and the words and numbers that every other output uses too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cuda_ops.output import time_text

from .compare import OURS
from .environment import DEBUG_BUILD
from .raised import kind_of
from .results import (
    CLIFF,
    CaseResult,
    PeerResult,
    Report,
    groups_of,
    mean_ratio,
    peer_names,
    ratios_of,
)
from .stats import Interval

#: What stands above the rows of :func:`memory_table`.
MEMORY = "memory at its peak, and kept for backward; in brackets theirs / ours"
#: What stands above the rows of :func:`sustained_table`.
SUSTAINED = "back to back; in brackets theirs / ours"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def rate_text(result: CaseResult) -> str:
    """Returns ``"3920 GB/s"`` or ``"612 TFLOP/s"``, whichever bounds the case."""
    if result.bound == "compute":
        return scaled(result.rate, "FLOP/s")
    return f"{result.rate / 1e9:.{0 if result.rate >= 1e11 else 1}f} GB/s"


def scaled(rate: float, unit: str) -> str:
    """Returns ``"4.25 TB/s"``: three digits and the prefix that fits."""
    factor, prefix = next((p for p in _PREFIXES if rate >= p[0]), _PREFIXES[-1])
    return f"{rate / factor:.3g} {prefix}{unit}"


def ratio_text(ratio: Interval) -> str:
    """Returns ``"1.04 ±0.01"``, with the larger side of the interval."""
    side = max(ratio.high - ratio.value, ratio.value - ratio.low)
    return f"{ratio.value:.2f} ±{side:.2f}"


def render(report: Report) -> Group:
    """Returns one table for each operator, then what is missing, wrong or left out."""
    parts: list[RenderableType] = [Text(heading(report))]
    for op in report.operators():
        parts += ["", _table(report, op)]
        header, rows = memory_table(report.of(op))
        if rows:
            grid = _grid(f"[bold]{escape(op)}[/], {MEMORY}", header)
            for row in rows:
                grid.add_row(*map(escape, row))
            parts += ["", grid]
        header, rows = sustained_table(report.of(op))
        if rows:
            grid = _grid(f"[bold]{escape(op)}[/], {SUSTAINED}", header)
            for row in rows:
                grid.add_row(*map(escape, row))
            parts += ["", grid]
    parts += [Text(line) for line in ("", *footnotes(report))]
    for result in report.errors:
        where = f"[red]error[/] {escape(f'{result.op} {result.case}: {result.error}')}"
        parts.append(Text.from_markup(where))
    return Group(*parts)


def heading(report: Report) -> str:
    """Returns device, versions, and the ceilings that percentages refer to."""
    known = report.environment
    clocks = f", {known['sm_clock_mhz']} MHz" if "sm_clock_mhz" in known else ""
    cold = report.cold_over_warm
    flushed = f"; cold reads take {cold:.2f}x as long as warm ones" if cold else ""
    if report.settings.get("clean_caches"):
        flushed += "; caches held nothing unwritten before each train"
    slow = f"debug build of {known[DEBUG_BUILD]}: " if DEBUG_BUILD in known else ""
    slow += "it is not optimized, and its times say nothing of the operator\n" if slow else ""
    return (
        f"{slow}{known['device']}{clocks}, torch {known['torch']}, {known['date']}, "
        f"commit {known['commit']}\n"
        f"measured ceilings: {ceilings_text(report) or 'none'}{flushed}\n"
        "ceiling: the share of it that is reached; peers: their time / ours, above 1 we are faster"
    )


def ceilings_text(report: Report) -> str:
    """Returns ``"memory 4.26 TB/s, bf16 781 to 805 TFLOP/s"``: a range if runs were joined."""
    rates = {kind: [rate.value] for kind, rate in report.ceilings.items()}
    bound: dict[str, list[float]] = {}
    for result in report.results:
        if result.floor_seconds:
            amount = result.flops if result.bound == "compute" else result.bytes
            bound.setdefault(kind_of(result), []).append(amount / result.floor_seconds)
    return ", ".join(f"{kind} {_range(kind, found)}" for kind, found in (rates | bound).items())


def _range(kind: str, rates: list[float]) -> str:
    low, high = (
        scaled(f(rates), "B/s" if kind in ("memory", "read") else "FLOP/s") for f in (min, max)
    )
    if low == high:
        return high
    number, unit = low.split()
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def _table(report: Report, op: str) -> Table:
    results = report.of(op)
    peers = peer_names(results)
    timed_host = any(result.host for result in results)
    host = ["host us"] if timed_host else []
    grid = _grid(f"[bold]{escape(op)}[/]", ("case", "time", "rate", "ceiling", *host, *peers))
    for result in results:
        if result.seconds is None:
            grid.add_row(escape(result.case), "[red]error[/]")
            continue
        mark = "" if result.converged else " ~"
        cells = [time_text(result.seconds.value) + mark, rate_text(result)]
        cells.append(f"{result.of_ceiling:.0%}")
        if timed_host:
            cells.append(host_text(result))
        cells += [peer_text(result.peers.get(peer)) for peer in peers]
        grid.add_row(escape(result.case), *cells)
    blank = [""] * (3 + timed_host)
    for label, means in mean_rows(results, peers):
        grid.add_row(f"[dim]{escape(label)}[/]", *blank, *means)
    return grid


def mean_rows(
    results: Sequence[CaseResult], peers: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yields what stands below the cases of an operator: geometric means of its groups, if it has
    some, of all, and of all with no ratio above :data:`~.results.CLIFF`, if one is above it.
    """

    def row(some: Sequence[CaseResult], most: float = math.inf) -> list[str]:
        means = [mean_ratio(some, peer, most) for peer in peers]
        return [f"{mean:.2f}" if mean else "" for mean in means]

    parts = [
        (f"mean of {name or 'the others'}", row(some)) for name, some in groups_of(results).items()
    ]
    for label, means in (*parts, ("geometric mean", row(results))):
        if any(means):
            yield label, means
    if has_cliffs(results):
        yield f"the same, {CLIFF:g} at most", row(results, CLIFF)


def has_cliffs(results: Iterable[CaseResult]) -> bool:
    """Tells whether a ratio is so large that it counts less in the second mean."""
    results = list(results)
    return any(max(ratios_of(results, p), default=0.0) > CLIFF for p in peer_names(results))


def _grid(title: str, header: Sequence[str]) -> Table:
    grid = Table(box=None, pad_edge=False, title_justify="left", title=title)
    for i, column in enumerate(header):
        grid.add_column(column, justify="right" if i else "left", no_wrap=True)
    return grid


def memory_table(results: Iterable[CaseResult]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns header and rows of the memory that calls take; no rows if none was measured."""
    measured = [(result, result.memory) for result in results if result.memory]
    peers = peer_names(result for result, _ in measured)
    rows = []
    for result, memory in measured:
        theirs = [result.peers.get(peer) for peer in peers]
        for what, ours in asdict(memory).items():
            if ours is not None:
                cells = (_memory_text(peer, what, ours) for peer in theirs)
                rows.append((result.case, what, _mebibytes(ours), *cells))
    return ("case", "MiB", OURS, *peers), rows


def sustained_table(
    results: Iterable[CaseResult],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns header and rows of the rates of calls back to back; no rows if none was measured."""
    timed = [(result, result.sustained) for result in results if result.sustained]
    peers = [
        name for name in peer_names(r for r, _ in timed)
        if any((peer := r.peers.get(name)) and peer.sustained for r, _ in timed)
    ]  # fmt: skip
    rows = []
    for result, ours in timed:
        unit = "FLOP/s" if result.flops else "B/s"
        amount = result.flops or result.bytes
        cells = [result.case, scaled(amount / ours.value, unit)]
        for name in peers:
            theirs = peer.sustained if (peer := result.peers.get(name)) else None
            cells.append(
                f"{scaled(amount / theirs.value, unit)} ({theirs.value / ours.value:.2f}x)"
                if theirs
                else ""
            )
        rows.append(tuple(cells))
    return ("case", OURS, *peers), rows


def _memory_text(peer: PeerResult | None, what: str, ours: int) -> str:
    if peer is None or peer.memory is None:
        return "missing" if peer and peer.missing else ""
    theirs = asdict(peer.memory)[what]
    return _mebibytes(theirs) + (f" ({theirs / ours:.2f}x)" if ours > 0 else "")


def _mebibytes(size: int) -> str:
    """Returns ``"1234"`` or ``"45.6"``."""
    value = size / 2**20
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def host_text(result: CaseResult) -> str:
    """Returns our host latency, and the first peer's: ``"6.9 (eager 6.3)"``."""
    if result.host is None:
        return ""
    for name, peer in result.peers.items():
        if peer.host is not None:
            return f"{result.host.value * 1e6:.1f} ({name} {peer.host.value * 1e6:.1f})"
    return f"{result.host.value * 1e6:.1f}"


def peer_text(peer: PeerResult | None) -> str:
    """Returns the ratio, or that there is none."""
    if peer is None:
        return ""
    return "missing" if peer.ratio is None else ratio_text(peer.ratio)


def footnotes(report: Report) -> Iterator[str]:
    """Returns what the tables leave open, each said once."""
    if any(result.seconds and not result.converged for result in report.results):
        yield (
            f"~ an interval is wider than {report.settings['precision']:.0%} "
            f"after {report.settings['seconds']:g} s"
        )
    for kind, why in report.raised.items():
        yield f"the {kind} ceiling is {why}"
    for op in report.operators():
        if has_cliffs(report.of(op)):
            yield (
                f"{op}: in the last mean a ratio above {CLIFF:g}, a cliff of the peer's, counts "
                f"as {CLIFF:g}"
            )
    taken = Counter(
        (result.op, name, peer.took.partition(" (")[0])
        for result in report.results
        for name, peer in result.peers.items()
        if peer.took
    )
    chosen: dict[tuple[str, str], list[str]] = {}
    for (op, name, which), n in taken.items():
        chosen.setdefault((op, name), []).append(f"{which} in {n}")
    for (op, name), counts in chosen.items():
        yield f"{op}: {name} is the fastest of several in each case: {', '.join(counts)}"
    cases = Counter(result.op for result in report.results)
    missing = Counter(
        (result.op, name, peer.missing)
        for result in report.results
        for name, peer in result.peers.items()
        if peer.missing
    )
    reasons = {
        f"{op}: peer {name} is missing{'' if n == cases[op] else f' in {n} of {cases[op]} cases'}: "
        f"{reason}"
        for (op, name, reason), n in missing.items()
    }
    said = Counter((r.op, note) for r in report.results for note in set(r.notes))
    notes = {
        f"{r.op}{'' if said[r.op, note] == cases[r.op] else f' {r.case}'}: {note}"
        for r in report.results
        for note in r.notes
    }
    yield from sorted(reasons | notes)
    for what, why in report.left_out.items():
        yield f"left out: {what}: {why}"
