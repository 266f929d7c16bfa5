"""The command line of the kit: ``python -m cuda_ops.benchmarking``."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from cuda_ops import output
from cuda_ops.build import cache
from cuda_ops.build.discovery import add_root_option
from cuda_ops.compile_ops import compile_ops
from cuda_ops.errors import BenchmarkError, CudaOpsError
from cuda_ops.registry import registry
from cuda_ops.spec import OpSpec

from .compare import QUICK, Settings
from .kit import Kit, cases_of
from .plots import draw
from .regression import regressions
from .results import CaseResult, Report
from .table import render

#: Exit statuses beside 0: something is wrong or slower, and nothing could be measured or compared.
FAILED, REFUSED = 1, 2


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, saves, draws, compares; returns the exit status."""
    arguments = _parser().parse_args(argv)
    # A pipe has no width; tables need one.
    width = None if sys.stdout.isatty() else 160
    console = Console(highlight=False, soft_wrap=True, width=width)
    try:
        # Read first: a base that cannot be used must not cost a run.
        base = _base(arguments)
        if arguments.json:
            if arguments.json.is_dir():
                raise BenchmarkError(f"--json {arguments.json}: expected a file, got a folder")
            _check_folder("--json", arguments.json, arguments.json.parent)
        if arguments.plot:
            _check_folder("--plot", arguments.plot, arguments.plot)
        report = _measured(arguments, console)
        tables = render(report)
        output.keep_words(console, tables)
        console.print(tables)
        if not report.results:
            raise BenchmarkError("nothing was measured")
        if arguments.plot:
            for path in draw(report, arguments.plot):
                console.print(f"wrote {path}", markup=False)
        slower = regressions(base, report) if base else []
        for regression in slower:
            console.print(f"[red]slower[/] {escape(str(regression))}")
        if base and not slower:
            console.print(f"not slower than {arguments.fail_if_regressed}", markup=False)
        unbuilt = report.left_out.keys() & registry().failures.keys()
        return FAILED if report.errors or slower or unbuilt else 0
    except (CudaOpsError, ValueError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        return REFUSED


def _check_folder(option: str, path: Path, folder: Path) -> None:
    """Refuses a folder that is a file or would have to lie in one."""
    there = next((part for part in (folder, *folder.parents) if part.exists()), folder)
    if there.exists() and not there.is_dir():
        what = "a file" if there == path else f"the file {there}"
        raise BenchmarkError(f"{option} {path}: expected a folder, got {what}")


def _base(arguments: argparse.Namespace) -> Report | None:
    path: Path | None = arguments.fail_if_regressed
    if path is None:
        return None
    if arguments.json and arguments.json.resolve() == path.resolve():
        raise BenchmarkError(
            f"--json would write over the base that --fail-if-regressed compares with: {path}"
        )
    return Report.load(path)


def _measured(arguments: argparse.Namespace, console: Console) -> Report:
    for root in arguments.root:
        registry().add_root(root)
    names = None if arguments.peers is None else {n for n in arguments.peers.split(",") if n}
    if names == {"none"}:
        names = set()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Progress is for a terminal, be it that of stderr: rich shows none in a file or a pipe.
    shown = console if console.is_terminal else Console(stderr=True)
    with shown.status("") as status:

        def progress(text: str) -> None:
            status.update(escape(text))

        progress("building")
        ops, left_out = _operators(arguments.ops)
        if ops:  # without operators, the reasons why they were left out say more
            _refuse_unknown(names or set(), arguments.cases, ops)
        progress("measuring the device")
        settings = replace(QUICK if arguments.quick else Settings(), sustained=arguments.sustained)
        kit = Kit(device, settings, names, arguments.cases, arguments.clean_caches)
        kit.left_out |= left_out
        results: list[CaseResult] = []

        def save(finished: bool) -> None:
            # A pipe or a device gets one report, since the next one would stand behind it.
            if arguments.json and (finished or not cache.is_stream(arguments.json)):
                kit.report(results, finished).save(arguments.json)

        def measured(result: CaseResult) -> None:
            results.append(result)
            save(finished=False)  # even a run that is killed keeps what it has

        try:
            for op in ops:
                begin, before = time.monotonic(), len(results)
                kit.measure(
                    op,
                    registry().plugins,
                    few=arguments.quick,
                    progress=progress,
                    measured=measured,
                )
                seconds = time.monotonic() - begin
                count = len(results) - before
                console.print(f"measured {op.key}: {count} cases in {seconds:.1f} s")
        except KeyboardInterrupt:
            console.print(render(kit.report(results)), f"interrupted after {len(results)} cases")
            raise
        save(finished=True)  # with what was left out
    return kit.report(results)


def _refuse_unknown(peers: set[str], pattern: str, ops: Sequence[OpSpec]) -> None:
    cases = [case for op in ops for case in cases_of(op, registry().plugins)]
    known = {name for case in cases for name in case.peers}
    if unknown := peers - known:
        listed = ", ".join(sorted(known)) or "none"
        raise BenchmarkError(f"no case has a peer {', '.join(sorted(unknown))}; known: {listed}")
    if pattern and not any(re.search(pattern, case.label) for case in cases):
        listed = "; ".join(dict.fromkeys(case.label for case in cases)) or "none"
        raise BenchmarkError(f"no case has {pattern!r} in its label; known: {listed}")


def _operators(names: Sequence[str]) -> tuple[list[OpSpec], dict[str, str]]:
    """Builds and loads the named pairs; returns their operators, and why others are left out."""
    ops: list[OpSpec] = []
    left_out: dict[str, str] = {}
    keys = [registry().key_in_command(name) for name in names]
    for row in compile_ops(keys, compare=False):
        if keys and row.op not in keys:  # built because another operator calls it
            continue
        if row.error:
            left_out[row.op] = row.error.splitlines()[0]
        elif not registry().pairs()[row.op].is_declared:
            left_out[row.op] = "a guest that no plugin describes: nothing says what to measure"
        else:
            ops += registry().specs(row.op).values()
    return ops, left_out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time operators against their peers and against the device, and check them.",
        epilog=f"exit status: {FAILED} if a case failed or became slower or a pair could not be "
        f"built, {REFUSED} if nothing could be measured or compared",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="pairs to measure (default: all)")
    parser.add_argument(
        "--peers", metavar="NAMES", help="such as eager,compile, or none (default: all of a case)"
    )
    parser.add_argument(
        "--cases",
        metavar="REGEX",
        type=regex,
        default="",
        help="only cases whose label matches, such as 'float16'",
    )
    parser.add_argument("--quick", action="store_true", help="few cases, wider intervals")
    parser.add_argument(
        "--clean-caches",
        action="store_true",
        help="start with caches that hold nothing unwritten, for operators that only read",
    )
    parser.add_argument(
        "--sustained",
        metavar="SECONDS",
        type=_seconds,
        default=0.0,
        help="also run each case back to back for so long, three times in turns with a peer, so "
        "that the power limit binds; 2 is enough (default: 0, which leaves it out)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything measured")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="draw roofline, ratios, bandwidth")
    parser.add_argument(
        "--fail-if-regressed",
        metavar="BASE.json",
        type=Path,
        help="fail if a case is slower than in this earlier --json, beyond noise",
    )
    add_root_option(parser, Path)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 60, got {text!r}")
    return seconds


def regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a regular expression: {error}"
        ) from error
    return text
