"""Draws a run: against the roofline, against the peers, and bandwidth by size.

The input is a :class:`~cuda_ops.benchmarking.results.Report`, so it may come from a file.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cuda_ops.errors import BenchmarkError

from .environment import DEBUG_BUILD
from .results import CaseResult, Report, peer_names
from .table import scaled

# Okabe and Ito's palette, which color-blind people can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^Dvph"
_UNITS = (("KiB", 10), ("MiB", 20), ("GiB", 30))
_SIZES = [(n << shift, f"{n} {unit}") for unit, shift in _UNITS for n in (1, 32)]
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 120,
    "svg.fonttype": "none",
    "svg.hashsalt": "cuda_ops",  # the same picture is the same file
}


def draw(report: Report, folder: Path) -> list[Path]:
    """Writes the pictures into ``folder`` as SVG; returns their paths.

    Raises:
        BenchmarkError: matplotlib is not installed, or there is nothing to draw.

    Example::

        draw(Report.load(Path("run.json")), Path("pictures"))
    """
    try:
        mpl: Any = importlib.import_module("matplotlib")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BenchmarkError("plots need matplotlib: pip install 'cuda_ops[plots]'") from error
    timed = [result for result in report.results if result.seconds is not None]
    if not timed:
        raise BenchmarkError("there is nothing to draw: no case was measured")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(_STYLE):
        for name, figure in _figures(report, timed, figures.Figure):
            path = folder / f"{name.replace('::', '.')}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
            written.append(path)
    return written


def _figures(report: Report, timed: list[CaseResult], new: Any) -> Iterable[tuple[str, Any]]:
    if any(result.flops for result in timed):
        yield "roofline", _roofline(report, timed, new)
    for op in report.operators():
        mine = [result for result in timed if result.op == op]
        if any(peer.ratio for result in mine for peer in result.peers.values()):
            yield f"{op}_ratio", _ratios(report, op, mine, new)
    streaming = [result for result in timed if result.bound != "compute" and not result.flops]
    if streaming:
        yield "bandwidth", _bandwidth(report, streaming, new)


def _roofline(report: Report, timed: list[CaseResult], new: Any) -> Any:
    """Draws FLOP/s over FLOPs per byte, under the roofs that were measured in the same run."""
    points = [result for result in timed if result.flops]
    memory = report.ceilings["memory"].value
    intensities = [result.flops / result.bytes for result in points]
    low, high = min(intensities) / 3, max(intensities) * 3
    figure = new(figsize=(7, 4.6))
    axes = figure.add_subplot(xscale="log", yscale="log")
    for kind, rate in report.ceilings.items():
        if kind == "memory" or not any(point.arithmetic == kind for point in points):
            continue
        ridge = rate.value / memory
        xs = [low, min(max(ridge, low), high), high]
        axes.plot(xs, [min(x * memory, rate.value) / 1e12 for x in xs], color="#999999", zorder=1)
        roof = f"{kind} {scaled(rate.value, 'FLOP/s')}"
        axes.annotate(
            roof, (high, rate.value / 1e12), (-2, 3), textcoords="offset points",
            ha="right", color="#666666", fontsize=9,
        )  # fmt: skip
    series = list(dict.fromkeys((point.op, point.dtype) for point in points))
    for i, (op, dtype) in enumerate(series):
        own = [p for p in points if (p.op, p.dtype) == (op, dtype)]
        axes.plot(
            [p.flops / p.bytes for p in own],
            [p.flops / p.seconds.value / 1e12 for p in own if p.seconds],
            ls="", marker=_MARKERS[i % len(_MARKERS)], color=_COLORS[i % len(_COLORS)],
            label=f"{op} {dtype}", ms=6,
        )  # fmt: skip
    axes.set(
        title=f"Roofline, {_device(report)}",
        xlabel="FLOPs per byte of the least traffic", ylabel="TFLOP/s", xlim=(low, high),
    )  # fmt: skip
    axes.legend(loc="lower right")
    return figure


def _ratios(report: Report, op: str, mine: list[CaseResult], new: Any) -> Any:
    """Draws each peer's time over ours, with its interval; right of the line we are faster."""
    peers = [name for name in peer_names(mine) if any(_ratio(r, name) for r in mine)]
    figure = new(figsize=(7, 0.9 + 0.32 * len(mine)))
    axes = figure.add_subplot(xscale="log")
    axes.axvline(1, color="#666666", lw=1)
    for i, peer in enumerate(peers):
        shift = (i - (len(peers) - 1) / 2) * 0.22
        rows = [(y, ratio) for y, r in enumerate(mine) if (ratio := _ratio(r, peer))]
        errors = [[r.value - r.low for _, r in rows], [r.high - r.value for _, r in rows]]
        axes.errorbar(
            [r.value for _, r in rows], [y + shift for y, _ in rows], xerr=errors, fmt=_MARKERS[i],
            color=_COLORS[i], ms=5, capsize=2, lw=1, label=peer,
        )  # fmt: skip
    axes.set_yticks(range(len(mine)), [result.case for result in mine])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    _plain_ticks(axes, [r for result in mine for p in peers if (r := _ratio(result, p))])
    axes.set(
        title=f"cuda_ops.{op}, {_device(report)}",
        xlabel="peer time / our time, 95 % interval; right of 1 we are faster",
    )
    axes.legend(loc="best")
    return figure


def _ratio(result: CaseResult, peer: str) -> Any:
    return result.peers[peer].ratio if peer in result.peers else None


def _plain_ticks(axes: Any, ratios: list[Any]) -> None:
    """Sets ticks such as 0.9, 1, 1.1 rather than powers of ten."""
    low, high = min(r.low for r in ratios), max(r.high for r in ratios)
    round_numbers = (
        0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1,
        1.1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 50, 100,
    )  # fmt: skip
    low, high = min(low, 0.9) / 1.05, max(high, 1.1) * 1.05
    ticks = [tick for tick in round_numbers if low <= tick <= high]
    if len(ticks) > 12:
        ticks = [tick for tick in ticks if tick not in (0.3, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 3, 7)]
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def _bandwidth(report: Report, streaming: list[CaseResult], new: Any) -> Any:
    """Draws GB/s over bytes for the operators that memory bounds, one panel each."""
    ops = list(dict.fromkeys(result.op for result in streaming))
    columns = min(2, len(ops))
    rows = -(-len(ops) // columns)
    figure = new(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
    ceiling = report.ceilings["memory"].value / 1e9
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, op in zip(grid.flat, ops, strict=False):
        axes.axhline(ceiling, color="#999999", lw=1, ls="--")
        axes.annotate(
            f"copy {ceiling:.0f} GB/s", (0.02, ceiling), (0, 3), textcoords="offset points",
            xycoords=("axes fraction", "data"), color="#666666", fontsize=8,
        )  # fmt: skip
        own = [result for result in streaming if result.op == op]
        for i, dtype in enumerate(dict.fromkeys(result.dtype for result in own)):
            line = sorted((r for r in own if r.dtype == dtype), key=lambda r: r.bytes)
            sizes, color = [r.bytes for r in line], _COLORS[i % len(_COLORS)]
            ours = [r.bytes / r.seconds.value / 1e9 for r in line if r.seconds]
            axes.plot(sizes, ours, marker="o", ms=4, color=color, label=dtype)
            first = next(iter(peer_names(line)), None)
            theirs = [
                (r.bytes, r.bytes / peer.seconds.value / 1e9)
                for r in line
                if first and (peer := r.peers.get(first)) and peer.seconds
            ]
            if theirs:
                axes.plot(*zip(*theirs, strict=True), marker="x", ms=4, ls=":", color=color,
                          label=f"{dtype}, {first}")  # fmt: skip
        axes.set(title=op, xscale="log", ylim=(0, ceiling * 1.15))
        axes.set_xlabel("bytes read and written")
        axes.set_ylabel("GB/s")
        axes.set_xticks([size for size, _ in _SIZES], [label for _, label in _SIZES])
        axes.set_xticks([], minor=True)
        axes.set_xlim(min(r.bytes for r in streaming) / 2, max(r.bytes for r in streaming) * 2)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.86))
    for axes in list(grid.flat)[len(ops) :]:
        axes.remove()
    figure.suptitle(f"Bandwidth by size, cold caches, {_device(report)}")
    return figure


def _device(report: Report) -> str:
    known = report.environment
    return known["device"] + (
        f", debug build of {known[DEBUG_BUILD]}" if DEBUG_BUILD in known else ""
    )
