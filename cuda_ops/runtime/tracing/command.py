"""``python -m cuda_ops profile``: traces a script, a module or one operator."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape

from cuda_ops import output
from cuda_ops.build.discovery import add_root_option
from cuda_ops.errors import CudaOpsError
from cuda_ops.names import unknown
from cuda_ops.runtime.tracing.table import render
from cuda_ops.runtime.tracing.traces import Trace, trace

if TYPE_CHECKING:
    from cuda_ops.spec import BenchmarkCase, OpSpec

#: Exit statuses beside the script's own: it raised, the call makes no sense.
FAILED, REFUSED = 1, 2
#: The traced calls of each case of an operator.
CALLS = 10


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Traces, prints tables; returns the exit status of the script."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    wanted = [bool(arguments.script), arguments.module is not None, arguments.op is not None]
    if sum(wanted) != 1:
        parser.error("expected one of SCRIPT, -m MODULE and --op NAME")
    if arguments.module == []:
        parser.error("argument -m: expected a module")
    if arguments.case and not arguments.op:
        parser.error("argument --case: expected --op NAME beside it")
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 180)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    status = 0
    try:
        with output.stdout_for_json(arguments.json):
            run = _of_operator(arguments, errors) if arguments.op else _of_program(arguments)
            with trace(
                arguments.output, shapes=arguments.shapes, stacks=arguments.stacks
            ) as traced:
                status = run()
    except (CudaOpsError, ValueError, OSError) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}")
        return REFUSED
    if arguments.json:
        print(json.dumps(_as_json(traced, status), indent=2))
        return status
    shown = render(traced, arguments.top)
    output.keep_words(console, shown)
    console.print(shown)
    if traced.path is not None:
        console.print(f"wrote {arguments.output}", markup=False)
    return status


def _as_json(traced: Trace, status: int) -> dict[str, Any]:
    return {
        "file": None if traced.path is None else str(traced.path),
        "status": status,
        "why_no_gpu": traced.why_no_gpu,
        "kernels": [asdict(row) for row in traced.kernels],
        "copies": [asdict(row) for row in traced.copies],
        "overlap": asdict(traced.overlap),
        "operators": [asdict(row) for row in traced.operators],
    }


# --- a script or a module ----------------------------------------------------------------


def _of_program(arguments: argparse.Namespace) -> Callable[[], int]:
    if arguments.module:
        name, *rest = arguments.module
        run = functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
        return functools.partial(_status_of, run, [name, *rest], str(Path.cwd()))
    script, *rest = arguments.script
    if not Path(script).exists():
        raise FileNotFoundError(f"there is no file {script}")
    run = functools.partial(runpy.run_path, script, run_name="__main__")
    return functools.partial(_status_of, run, [script, *rest], str(Path(script).resolve().parent))


def _status_of(run: Callable[[], object], words: list[str], folder: str) -> int:
    """Runs a program as Python would; returns its exit status. Its exception is shown as usual."""
    try:
        with _called_as(words, folder):
            run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as error:
        _show(error)
        return output.INTERRUPTED
    except Exception as error:
        _show(error)
        return FAILED
    return 0


@contextlib.contextmanager
def _called_as(words: list[str], folder: str) -> Iterator[None]:
    arguments, path = sys.argv, sys.path
    sys.argv, sys.path = list(words), [folder, *path]
    try:
        yield
    finally:
        sys.argv, sys.path = arguments, path


def _show(error: BaseException) -> None:
    """Shows an exception without the frames that stand above the program's own."""
    above = {__file__, runpy.run_path.__code__.co_filename}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in above:
        frames = frames.tb_next
    sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(frames), frames)


# --- an operator -------------------------------------------------------------------------


def _of_operator(arguments: argparse.Namespace, console: Console) -> Callable[[], int]:
    """Returns what calls an operator with the arguments of its benchmark cases."""
    from cuda_ops.benchmarking.kit import cases_of
    from cuda_ops.registry import registry

    for root in arguments.root:
        registry().add_root(root)
    op = _operator(arguments.op)
    cases = cases_of(op, registry().plugins)
    if not cases:
        raise CudaOpsError(
            f"{op.key} has no cases: give a signature line or implement cuda_ops_benchmarks"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = []
    for case in _chosen(op, cases, arguments.case or "", device):
        console.print(f"{op.key}: {case.label} on {device.type}", markup=False)
        steps.append((case.label, _step(op, case, device)))

    def run() -> int:
        for label, step in steps:
            with torch.profiler.record_function(f"{op.key}: {label}"):
                for _ in range(CALLS):
                    step()
        return 0

    for _, step in steps:
        step()  # so that what happens once, such as loading a kernel, is not in the trace
    return run


def _operator(name: str) -> OpSpec:
    from cuda_ops.compile_ops import compile_ops
    from cuda_ops.registry import registry

    key = registry().key_in_command(name)
    # The names of a pair's operators begin with its own: silu_backward is one of silu.
    pairs = sorted((p for p in registry().pairs() if key.startswith(p)), key=len, reverse=True)
    for row in compile_ops(pairs, compare=False) if pairs else ():
        if row.op in pairs and row.error:
            raise CudaOpsError(row.error)
    for pair in pairs:
        if key in registry().specs(pair):
            return registry().specs(pair)[key]
    raise CudaOpsError(unknown([name], registry().pairs()))


def _chosen(
    op: OpSpec, cases: Sequence[BenchmarkCase], pattern: str, device: torch.device
) -> list[BenchmarkCase]:
    """Returns the cases whose labels match; without a pattern the largest one that fits a GPU, and
    the smallest one for a CPU.
    """
    from cuda_ops.benchmarking import capacity

    asked = [case for case in cases if re.search(pattern, case.label)]
    if not asked:
        labels = "; ".join(dict.fromkeys(case.label for case in cases))
        raise CudaOpsError(f"{op.key}: no case has {pattern!r} in its label; known: {labels}")
    reasons = {case.label: capacity.too_large(case, device) for case in asked}
    fitting = [case for case in asked if not reasons[case.label]]
    if not fitting:
        raise CudaOpsError("; ".join(f"{op.key} {name}: {why}" for name, why in reasons.items()))
    if pattern:
        return fitting
    end = max if device.type == "cuda" else min
    return [end(fitting, key=lambda case: (case.bytes, case.flops))]


def _step(op: OpSpec, case: BenchmarkCase, device: torch.device) -> Callable[[], object]:
    from cuda_ops.benchmarking.rotation import Rotation
    from cuda_ops.benchmarking.training import with_gradients
    from cuda_ops.testing.samples import DeviceArg

    keywords = {
        name: device if isinstance(value, DeviceArg) else value
        for name, value in case.keywords.items()
    }
    function: Callable[..., Any] = functools.partial(case.function or op.function, **keywords)
    if case.backward:
        fixed = [op.argument_names.index(name) for name in op.no_gradient]
        function = with_gradients(function, fixed=fixed)
    return functools.partial(function, *Rotation(case, device, 2).arguments[0])


def _regex(text: str) -> str:
    # Where there is no --case, the program that is traced has no kit imported.
    from cuda_ops.benchmarking.command import regex

    return regex(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ops profile",
        usage="%(prog)s [options] (SCRIPT | -m MODULE | --op NAME) [argument ...]",
        description="Trace a script, a module or an operator, and print where the time went.",
        epilog=f"exit status: the script's own, {FAILED} if it raised, {REFUSED} if nothing could "
        "be traced",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script, and its arguments"
    )
    parser.add_argument(
        "-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE",
        help="a module to run as a script, and its arguments",
    )  # fmt: skip
    parser.add_argument(
        "--op", metavar="NAME", help=f"an operator: {CALLS} calls with a case of its benchmark"
    )
    parser.add_argument(
        "--case",
        metavar="REGEX",
        type=_regex,
        help="cases of --op whose label matches (default: the largest on a GPU, else the smallest)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="keep the Chrome trace, .json or .json.gz"
    )
    parser.add_argument("--json", action="store_true", help="print the tables as JSON on stdout")
    parser.add_argument(
        "--top",
        metavar="N",
        type=output.at_least(1),
        default=20,
        help="rows of each table (default: 20)",
    )
    parser.add_argument("--shapes", action="store_true", help="trace the shapes of arguments")
    parser.add_argument(
        "--stacks", action="store_true", help="trace Python functions too, which is slow"
    )
    add_root_option(parser, Path)
    return parser
