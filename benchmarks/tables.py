"""Generates the tables of the documents from the committed runs.

``python -m benchmarks.tables`` writes them and ``--check`` fails where one differs. ``--keep
RUN.json`` first stores a run of ``python -m benchmarks --json RUN.json``: a run of some ``--cases``
replaces those cases alone, and peers that it did not measure keep their earlier results.
A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. One named ``cases of
OP, OP`` has the cases of these operators.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import tables_of_runs
from benchmarks.report import REPO
from benchmarks.stored import DEVICES, RESULTS, file_of, json_of, markdown, reports
from cuda_ops.benchmarking import plots, regression
from cuda_ops.benchmarking.environment import DEBUG_BUILD
from cuda_ops.benchmarking.peers import COMPILE, EAGER
from cuda_ops.benchmarking.raised import kind_of
from cuda_ops.benchmarking.results import (
    CLIFF,
    CaseResult,
    PeerResult,
    Report,
    mean_ratio,
    peer_names,
    ratios_of,
)
from cuda_ops.benchmarking.stats import Interval
from cuda_ops.benchmarking.table import (
    MEMORY,
    SUSTAINED,
    ceilings_text,
    footnotes,
    mean_rows,
    memory_table,
    rate_text,
    ratio_text,
    scaled,
    sustained_table,
)
from cuda_ops.errors import BenchmarkError
from cuda_ops.output import time_text

_CLEAN = "clean_caches"
_CASES_OF = "cases of "
_BLOCK = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def documents() -> list[Path]:
    """Returns every document that may hold a table."""
    folders = (REPO / "docs", REPO / "benchmarks" / "results")
    return [REPO / "README.md", *(page for f in folders for page in sorted(f.rglob("*.md")))]


def updated(text: str, base: Path) -> str:
    """Returns the text with every table generated anew; links are relative to the folder ``base``.

    Raises:
        BenchmarkError: a table has an unknown name or no end.
    """
    if text.count("<!-- table:") != len(_BLOCK.findall(text)):
        raise BenchmarkError("a <!-- table: NAME --> has no <!-- end of table -->")

    def made(match: re.Match[str]) -> str:
        name = match[2]
        if name.startswith(_CASES_OF):
            text = _cases_of(name.removeprefix(_CASES_OF).split(", "))
        elif name in _TABLES:
            text = _TABLES[name](base)
        else:
            known = ", ".join(map(repr, (*_TABLES, f"{_CASES_OF}OP, OP")))
            raise BenchmarkError(f"no table {name!r}; known: {known}")
        return f"{match[1]}{text.strip()}\n{match[4]}"

    return _BLOCK.sub(made, text)


def keep(run: Path, results: Path = RESULTS) -> list[Path]:
    """Stores a run in the folder of its device, one file a pair, with its pictures, and returns
    what was written. A run of some cases, or one that was interrupted, replaces those cases alone.
    A run with clean caches goes into a folder of its own, without pictures.

    Raises:
        BenchmarkError: a case failed, the run was ``--quick``, of a debug build, or from a device
            that no table looks for, or it has some cases only and other versions than the stored
            ones.
    """
    report = Report.load(run)
    if report.errors:
        first = report.errors[0]
        raise BenchmarkError(f"{run}: {first.op} {first.case} failed: {first.error}")
    if report.settings["precision"] > 0.01:
        raise BenchmarkError(f"{run} is of a quick run; measure without --quick to keep it")
    if debugged := report.environment.get(DEBUG_BUILD):
        raise BenchmarkError(
            f"{run} is of a debug build of {debugged}; measure the ordinary build to keep it"
        )
    name = report.environment["device"]
    device = next((known for known in DEVICES if known in name.lower().split()), None)
    if device is None:
        raise BenchmarkError(f"{run} was measured on {name}, expected one of {', '.join(DEVICES)}")
    results /= device
    written = []
    clean = report.settings.get("clean_caches", False)
    is_part = bool(report.settings.get("cases")) or not report.settings.get("finished", True)
    for pair in report.pairs():
        mine = [result for result in report.results if result.pair == pair]
        ours = {result.op for result in mine}
        left_out = {k: v for k, v in report.left_out.items() if k.split()[0] in ours}
        part = replace(report, results=mine, left_out=left_out)
        path = results / (_CLEAN if clean else "operators") / f"{pair}.json"
        if is_part and path.exists():
            part = _among(part, Report.load(path))
        part.save(path)
        written.append(path)
        if clean:
            continue
        for old in (results / "plots" / pair).glob("*.svg"):
            old.unlink()
        written += plots.draw(part, results / "plots" / pair)
    return written


def _among(part: Report, kept: Report) -> Report:
    """Merges cases that were measured again into an earlier run. Cases and peers that come from the
    earlier run keep its commit.
    """
    for version in ("device", "torch", "triton", "cuda"):
        then, today = (report.environment.get(version) for report in (kept, part))
        if then != today:
            raise BenchmarkError(
                f"the kept cases were measured with {version} {then}, these with {today}: "
                "measure all"
            )
    now, before = part.environment["commit"], kept.environment["commit"]
    again = {(result.op, result.case): result for result in part.results}

    def of(commit: str) -> str:
        return "" if commit == now else commit

    results = []
    for result in kept.results:
        commit = result.commit or before
        later = again.pop((result.op, result.case), None)
        if later is None:
            results.append(replace(result, commit=of(commit)))
            continue
        peers = result.peers | later.peers
        for name, old in result.peers.items():
            new = later.peers.get(name)
            if new is None or (new.ratio is None and old.ratio is not None):
                peers[name] = replace(old, commit=of(old.commit or commit))
        results.append(replace(later, peers=peers))
    return replace(
        part,
        settings=kept.settings,
        results=[*results, *again.values()],
        left_out=kept.left_out | part.left_out,
        raised=kept.raised | part.raised,
    )


# --- what the tables say ---------------------------------------------------------------


def _working(base: Path) -> str:
    """Says what it costs to write an operator and to call it."""
    loop, calls = json_of("dev_loop"), json_of("call_overhead")
    median = {k: statistics.median(v) for k, v in loop["results"]["seconds"].items()}
    ratio = {entry["mode"]: entry["ratio"] for entry in calls["results"] if "mode" in entry}
    rows = [
        (
            "save of a kernel until it has run",
            f"{median['kernel edit']:.2f} s",
            (
                "the tutorials' form through `cpp_extension.load`: "
                f"{median['tutorial, kernel edit']:.1f} s, {loop['results']['ratio']:.1f}x"
            ),
        ),
        (
            "`compile_dev.py` with nothing changed",
            f"{loop['results']['no_op_ratio']:.2f}x",
            "`import torch`",
        ),
        (
            "eager call at 1K elements",
            f"{ratio['grad mode']:.2f}x",
            (
                f"`F.silu`; no_grad {ratio['no_grad']:.2f}x, inference_mode "
                f"{ratio['inference_mode']:.2f}x, with a gradient wanted "
                f"{ratio['requires_grad']:.2f}x"
            ),
        ),
    ]
    made = "; ".join(
        f"{name} on an {known['device']}, torch {known['torch']}, {known['date']}"
        for name, known in (("the loop", loop["environment"]), ("calls", calls["environment"]))
    )
    return f"Measured: {made}.\n\n{markdown(('', 'takes', 'against'), rows)}"


def _families(base: Path) -> str:
    """Has one line for each page of docs/kernels: means alone, in which no cliff of a peer counts
    for more than it should.
    """
    runs, rows = _runs(), []
    for page, pairs in _pages().items():
        title = page.read_text(encoding="utf-8")[2:].partition(":")[0]
        of_pair = {pair: runs[pair].of(pair) for pair in pairs if pair in runs}
        measured = [result for results in of_pair.values() for result in results]
        names = ", ".join(f"`{pair}`" for pair in pairs)
        gpus = ", ".join(dict.fromkeys(_gpu(runs[pair]) for pair in pairs if pair in runs))
        means = {
            peer: f"{mean:.2f}x{_whose(of_pair, peer)}"
            for peer in peer_names(measured)
            if (mean := mean_ratio(measured, peer, CLIFF)) is not None
        }
        others = ", ".join(f"{p} {mean}" for p, mean in means.items() if p not in (EAGER, COMPILE))
        cells = (means.get(EAGER, ""), means.get(COMPILE, ""), others)
        rows.append((f"[{title}]({_relative(page, base)})", names, gpus, *cells))
    heading = (
        f"{_machines(runs)}.\nThe peer's time over ours: geometric means of all cases that the "
        f"peer has; a ratio above {CLIFF:g} counts as {CLIFF:g}.\nBrackets say which of a row's "
        "operators have a peer, or how many of them or of their cases, where not all do."
    )
    table = markdown(("", "operators", "GPU", EAGER, COMPILE, "others"), rows)
    return f"{heading}\n\n{table}"


def _runs() -> dict[str, Report]:
    """Returns the committed run that has an operator's cases, by the operator's name."""
    return {op: report for report in reports().values() for op in report.operators()}


def _whose(of_pair: Mapping[str, list[CaseResult]], peer: str) -> str:
    """Says which operators of a page have a peer, and in how many of their cases, unless all do."""
    having = {op: results for op, results in of_pair.items() if ratios_of(results, peer)}
    said = []
    if len(having) < len(of_pair):
        some = f"{len(having)} of {len(of_pair)}"
        said.append(some if len(having) > 1 else ", ".join(f"`{op}`" for op in having))
    cases = sum(map(len, having.values()))
    compared = sum(len(ratios_of(results, peer)) for results in having.values())
    if compared < cases:
        said.append(f"{compared} of {cases} cases")
    return f" ({'; '.join(said)})" if said else ""


def _operators(base: Path) -> str:
    """Has one line for each operator that a page of docs/kernels names in its title."""
    runs = _runs()
    links = {
        pair: f"[`{pair}`]({_relative(page, base)})"
        for page, pairs in _pages().items()
        for pair in pairs
    }
    rows = [
        (link, _gpu(runs[pair]), *_summary(runs[pair].of(pair)))
        for pair, link in links.items()
        if pair in runs
    ]
    header = ("operator", "GPU", "at most", EAGER, COMPILE, "others")
    waiting = ", ".join(link for pair, link in links.items() if pair not in runs)
    waiting = f"\n\nWithout a committed run: {waiting}." if waiting else ""
    return f"{_heading(runs)}\n\n{markdown(header, rows)}{waiting}"


def _pages() -> dict[Path, list[str]]:
    """Returns the operators that each page of docs/kernels names in its title."""
    return {
        page: re.findall(r"`(\w+)`", page.read_text(encoding="utf-8").partition("\n")[0])
        for page in sorted((REPO / "docs" / "kernels").glob("*.md"))
    }


def _gpu(report: Report) -> str:
    """Returns a GPU's name without its maker and memory: ``"H100"``."""
    return report.environment["device"].split()[1]


def _machines(runs: dict[str, Report]) -> str:
    made = {(e["device"], e["torch"], e["cuda"]) for e in (r.environment for r in runs.values())}
    return "; ".join(f"{gpu}, torch {torch}, CUDA {cuda}" for gpu, torch, cuda in sorted(made))


def _heading(runs: dict[str, Report]) -> str:
    return (
        f"{_machines(runs)}.\nRatios are the peer's time over ours, so above 1 we are faster: the "
        "geometric mean of all cases\nthat the peer has (worst case; capped: the mean where a "
        f"ratio above {CLIFF:g}, a cliff of the peer's, counts as {CLIFF:g}).\nNo share of a "
        "ceiling is above 100 %: a case that goes above a measured one raises it for\nits run, and "
        "its row says so.\n"
        "`python -m benchmarks OP` measures one operator."
    )


def _summary(results: list[CaseResult]) -> tuple[str, ...]:
    """Returns what a line says of cases, such as
    ``("4.1 TB/s, 97% of the memory ceiling", "1.03x (0.98)", "0.99x (0.95)", "cub 1.2x (1.1)")``.
    """
    if not results:
        return ("not measured yet", "", "", "")
    best = max(results, key=lambda result: result.of_ceiling)
    unit = "FLOP/s" if best.bound == "compute" else "B/s"
    share = f"{best.of_ceiling:.0%} of the {kind_of(best)} ceiling"
    if best.seconds is not None and best.seconds.value <= best.floor_seconds:  # it raised it
        share = f"above the measured {kind_of(best)} ceiling"
    ratios = {peer: _mean_and_least(results, peer) for peer in peer_names(results)}
    others = [f"{p} {text}" for p, text in ratios.items() if text and p not in (EAGER, COMPILE)]
    return (
        f"{scaled(best.rate, unit)}, {share}",
        ratios.get(EAGER) or "no peer",
        ratios.get(COMPILE) or "no peer",
        ", ".join(others) or "no peer",
    )


def _mean_and_least(results: list[CaseResult], peer: str) -> str:
    mean = mean_ratio(results, peer)
    if mean is None:
        return ""
    ratios = ratios_of(results, peer)
    some = "" if len(ratios) == len(results) else f"; {len(ratios)} of {len(results)} cases"
    most = f"; {mean_ratio(results, peer, CLIFF):.2f}x capped" if max(ratios) > CLIFF else ""
    return f"{mean:.2f}x ({min(ratios):.2f}{most}{some})"


def _behind(base: Path) -> str:
    """Lists the peers that beat an operator by more than two runs of equal code differ."""
    rows = []
    for report in reports().values():
        for op in report.operators():
            results = report.of(op)
            for peer in peer_names(results):
                ratios = {
                    result.case: ratio.value
                    for result in results
                    if peer in result.peers and (ratio := result.peers[peer].ratio)
                }
                slower = {c: r for c, r in ratios.items() if r < 1 - regression.BETWEEN_RUNS}
                if slower:
                    worst = min(slower, key=lambda case: slower[case])
                    count = f"{len(slower)} of {len(ratios)} cases"
                    least = f"{slower[worst]:.2f}x"
                    rows.append((f"`{op}`", _gpu(report), peer, count, worst, least))
    header = ("operator", "GPU", "faster peer", "in", "worst case", "its time over ours")
    return markdown(header, rows)


def _cases(base: Path) -> str:
    """Has every case of every operator, with the pictures."""
    return "\n\n".join(_of_pair(pair, report, base) for pair, report in reports().items())


def _of_pair(pair: str, report: Report, base: Path) -> str:
    known = report.environment
    parts = [
        f"## {pair}",
        (
            f"{known['device']}, driver {known['driver']}, torch {known['torch']}, "
            f"{known['date']}, commit {known['commit']}{_earlier(report)}.\n"
            f"Measured ceilings: {ceilings_text(report)}."
        ),
    ]
    for op in report.operators():
        results = report.of(op)
        peers = peer_names(results)
        header = ("case", "why", "time", "rate", "ceiling", "host us", *peers)
        rows = [_row(result, peers) for result in results]
        for label, means in mean_rows(results, peers):
            bold = [f"**{mean}**" if mean else "" for mean in means]
            rows.append((f"**{label}**", "", "", "", "", "", *bold))
        parts.append(f"### {op}\n\n{markdown(header, rows)}")
        taken, figures = memory_table(results)
        if figures:
            parts.append(f"{MEMORY.capitalize()}:\n\n{markdown(taken, figures)}")
        names, rates = sustained_table(results)
        if rates:
            parts.append(f"{SUSTAINED.capitalize()}:\n\n{markdown(names, rates)}")
    notes = list(footnotes(report))
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    for picture in sorted(
        (file_of(f"operators/{pair}").parent.parent / "plots" / pair).glob("*.svg")
    ):
        title = f"{pair}: {picture.stem.replace('_', ' ')}"
        parts.append(f"![{title}]({_relative(picture, base)})")
    return "\n\n".join(parts)


def _earlier(report: Report) -> str:
    """Returns ``"; 1234567: 3 cases, triton in 1 case"`` for what comes from earlier runs."""
    parts: dict[str, Counter[str]] = {}
    for result in report.results:
        parts.setdefault(result.commit, Counter())[""] += 1
        for name, peer in result.peers.items():
            parts.setdefault(peer.commit, Counter())[f"{name} in "] += 1
    parts.pop("", None)
    text = "".join(
        f"; {commit}: "
        + ", ".join(
            f"{what}{n} {'case' if n == 1 else 'cases'}" for what, n in sorted(counted.items())
        )
        for commit, counted in parts.items()
    )
    if any(what for counted in parts.values() for what in counted):
        text += ". Peers of an earlier commit are beside what the operator took then"
    return text


def _row(result: CaseResult, peers: Sequence[str]) -> tuple[str, ...]:
    assert result.seconds is not None  # keep() refuses runs with errors
    mark = "" if result.converged else " ~"
    host = f"{result.host.value * 1e6:.1f}" if result.host else ""
    return (
        result.case,
        result.reason,
        time_text(result.seconds.value) + mark,
        rate_text(result),
        f"{result.of_ceiling:.0%}",
        host,
        *(_peer(result.peers.get(peer)) for peer in peers),
    )


def _peer(peer: PeerResult | None) -> str:
    if peer is None or peer.ratio is None:
        return "" if peer is None else "missing"
    host = f", host {peer.host.value * 1e6:.1f}" if peer.host else ""
    return ratio_text(peer.ratio) + host


def _cases_of(operators: Sequence[str]) -> str:
    """Has the cases of some operators, with a time and what their peers took."""
    measured = {op: run for op, run in _runs().items() if op in operators}
    if missing := [op for op in operators if op not in measured]:
        raise BenchmarkError(f"no committed run has {', '.join(missing)}")
    made = {
        f"{e['device']}, torch {e['torch']}, CUDA {e['cuda']}, {e['date']}, commit {e['commit']}"
        f"{_earlier(report)}.\n"
        for report in measured.values()
        for e in (report.environment,)
    }
    results = [result for op in operators for result in measured[op].of(op)]
    peers = [p for p in peer_names(results) if mean_ratio(results, p) is not None]
    rows = [(f"`{r.op}` {r.case}", *_row(r, peers)[2:5], *_row(r, peers)[6:]) for r in results]
    header = ("case", "time", "rate", "of the ceiling", *peers)
    return f"{''.join(sorted(made))}\n{markdown(header, rows)}"


def _mixtures(base: Path) -> str:
    """Has the run of ``moe``, a column for each model."""
    return _by_model(reports()["moe"].of("moe"))


def _decoding(base: Path) -> str:
    """Has the run of few tokens with clean caches, a column for each model."""
    return _by_model(Report.load(file_of(f"{_CLEAN}/moe")).of("moe"))


def _by_model(results: list[CaseResult]) -> str:
    cells: dict[str, dict[str, str]] = {}

    def ratio(result: CaseResult, name: str) -> Interval | None:
        return peer.ratio if (peer := result.peers.get(name)) else None

    measured = [name for name in peer_names(results) if any(ratio(r, name) for r in results)]
    for result in results:
        match = re.fullmatch(
            r"(.+), T=(\d+) bfloat16(, forward and backward|, skewed)?", result.case
        )
        assert match is not None and result.seconds is not None
        ratios = [f"{of.value:.2f}x" if (of := ratio(result, name)) else "-" for name in measured]
        time = f"{time_text(result.seconds.value)} ({result.of_ceiling:.0%})"
        kinds = {", forward and backward": ", trained", None: ""}
        step = match[2] + kinds.get(match[3], match[3])
        cells.setdefault(step, {})[match[1]] = ", ".join((time, *ratios))
    models = list(dict.fromkeys(model for row in cells.values() for model in row))
    rows = [(step, *(row.get(model, "") for model in models)) for step, row in cells.items()]
    return markdown(("tokens", *models), rows)


_TABLES = {
    "working": _working,
    "families": _families,
    "operators": _operators,
    "behind": _behind,
    "cases": _cases,
    "mixtures": _mixtures,
    "decoding": _decoding,
    **tables_of_runs.TABLES,
}


# --- reading and writing ---------------------------------------------------------------


def _relative(path: Path, base: Path) -> str:
    up = 0
    while not path.is_relative_to(base):
        base, up = base.parent, up + 1
    return "../" * up + path.relative_to(base).as_posix()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        for path in keep(arguments.keep) if arguments.keep else []:
            print(f"wrote {path}")
        differing = []
        for path in documents():
            text = path.read_text(encoding="utf-8")
            new = updated(text, path.parent)
            if new != text:
                differing.append(path)
                if not arguments.check:
                    path.write_text(new, encoding="utf-8")
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in differing:
        print(f"{path.relative_to(REPO)} {'differs' if arguments.check else 'updated'}")
    return int(arguments.check and bool(differing))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a table differs")
    parser.add_argument("--keep", metavar="RUN.json", type=Path, help="store this run first")
    return parser


if __name__ == "__main__":
    sys.exit(main())
