"""``python -m cuda_ops.testing``: replay a failed sample, report, sanitize, fuzz."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path

import torch

from cuda_ops import output
from cuda_ops.build import threads
from cuda_ops.errors import CudaOpsError
from cuda_ops.testing.case import Case
from cuda_ops.testing.checks import by_name
from cuda_ops.testing.compare import quoted
from cuda_ops.testing.fuzzing import command as fuzzing
from cuda_ops.testing.mutation import command as mutation
from cuda_ops.testing.profiles import PROFILES
from cuda_ops.testing.report import CheckEntry, CheckReport, command, markdown, read_junit
from cuda_ops.testing.runner import check_op, why_not
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import Origin, described, find
from cuda_ops.testing.worker import Worker, begin, load_origin, perform


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if all checks passed, 1 if not, 2 for a wrong call."""
    arguments = _parser().parse_args(argv)
    try:
        load_origin(Origin(tuple(arguments.root), arguments.file))
        status: int = arguments.run(arguments)
        return status
    except (CudaOpsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a file that an option names
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 2


def parse_line(line: str) -> tuple[str, str, str, Sample]:
    """Returns operator, check, device and sample of ``silu::layouts[cpu] Sample(...)``.

    Raises:
        ValueError: the line has another form.
    """
    where, _, sample = line.strip().partition(" ")
    operator, _, rest = where.rpartition("::")
    check, _, device = rest.partition("[")
    if not operator or not device.endswith("]"):
        raise ValueError(f"{line!r}: expected OP::CHECK[DEVICE] Sample(...)")
    return operator, check, device[:-1], Sample.parse(sample) if sample else Sample(())


def replay(line: str, *, isolate: bool = True) -> CheckEntry:
    """Runs the one case that a failure printed.

    Raises:
        CudaOpsError: the operator is unknown or cannot be used.
        ValueError: the line has another form, or names an unknown check.
    """
    name, check_name, device, sample = parse_line(line)
    check, subject = by_name(check_name), find(name)
    if reason := why_not(check, subject, device):
        return CheckEntry(check.name, device, None, reason)
    case = Case(subject, device, sample)
    if isolate:
        with Worker(PROFILES["dev"].timeout) as worker:
            outcome = worker(check, case)
    else:
        outcome = perform(check, case)
    passed = {"passed": True, "failed": False, "not run": None}[outcome.status]
    again = command(subject, check.name, device, sample)
    refusal = quoted([(sample, outcome.refusal)]) if outcome.refusal else ""
    return CheckEntry(
        check.name,
        device,
        passed,
        outcome.detail,
        outcome.label or check.title,
        1,
        again,
        refusal=refusal,
    )


def _replay(arguments: argparse.Namespace) -> int:
    entry = replay(arguments.line, isolate=not arguments.here)
    print(entry)
    return 0 if entry.passed else 1


def _report(arguments: argparse.Namespace) -> int:
    stopped = False
    with output.stdout_for_json(arguments.json):
        reports = read_junit(*arguments.junit) if arguments.junit else []
        for report in reports:
            _print_failures(report)
        if not arguments.junit:
            try:
                for report in _checked(arguments, _names(arguments.ops)):
                    reports.append(report)
            except KeyboardInterrupt:  # what took minutes is not lost
                stopped = True
    reports.sort(key=lambda report: report.op)
    if arguments.json:
        print(json.dumps([report.as_json() for report in reports], indent=2))
    else:
        print(markdown(reports), end="")
    if stopped:
        print(f"interrupted; operators checked: {len(reports)}", file=sys.stderr)
        return output.INTERRUPTED
    return int(not reports or not all(report.passed for report in reports))


def _print_failures(report: CheckReport) -> None:
    for failure in report.failures:
        print(f"{report.op}\n{failure}", file=sys.stderr, flush=True)


def _checked(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[CheckReport]:
    """Yields the reports of some operators as they are done."""
    origin = Origin(tuple(arguments.root), arguments.file)
    # Many processes with many threads each would slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // arguments.jobs)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Spawned, not forked: CUDA does not survive a fork.
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), begin, (origin,)) as pool:
        checked = partial(check_op, profile=PROFILES[arguments.profile])
        try:
            for future in threads.completed([pool.submit(checked, name) for name in names]):
                report = future.result()
                verdict = ", ".join(failure.name for failure in report.failures)
                verdict = f"FAILED {verdict}" if verdict else "passed"
                print(f"checked {report.op}: {verdict}", file=sys.stderr, flush=True)
                _print_failures(report)  # at once: a run may take an hour, or be killed
                yield report
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():  # Ctrl-C in one process is not seen by the others
                process.terminate()
            raise


def _sanitize(arguments: argparse.Namespace) -> int:
    from cuda_ops.testing import sanitizer

    ledger = sanitizer.read_ledger(Path(arguments.ledger)) if arguments.ledger else []
    findings = sanitizer.run(_names(arguments.ops), arguments.tool or sanitizer.TOOLS)
    verdict = sanitizer.judge(findings, ledger)
    print(verdict)
    return int(not verdict.passed)


def _ranks(arguments: argparse.Namespace) -> int:
    from cuda_ops.testing.ranks import check_ranks, ranks_markdown

    origin = Origin(tuple(arguments.root), arguments.file)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = check_ranks(_names(arguments.ops), arguments.ranks, device, origin)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    elif arguments.markdown:
        name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
        today = datetime.date.today().isoformat()
        where = f"{arguments.ranks} ranks on {name}, {today}, torch {torch.__version__}"
        print(ranks_markdown(found, where), end="")
    else:
        print(*found, sep="\n")
    counts = [sum(one.passed is passed for one in found) for passed in (True, False, None)]
    on = f"{arguments.ranks} ranks on {device}"
    print("{} passed, {} failed, {} not run, ".format(*counts) + on, file=sys.stderr)
    return int(counts[1] > 0 or counts[0] == 0)


def _names(chosen: Sequence[str]) -> list[str]:
    from cuda_ops.registry import all_operators, operators_of, registry

    if not chosen:
        return [*all_operators(), *described()]
    names = operators_of(map(registry().key_in_command, chosen))
    for name in names:
        find(name)  # refuses it here, before the others take their minutes
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cuda_ops.testing", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", action="append", default=[], metavar="DIR",
                        help="a folder with kernels/ and bindings/; repeatable")  # fmt: skip
    common.add_argument("--file", default="", help="a Python file that describes operators")
    commands = parser.add_subparsers(required=True)

    again = commands.add_parser("replay", parents=[common], help="run a failed sample again")
    again.add_argument("line", help="what a failure printed: OP::CHECK[DEVICE] Sample(...)")
    again.add_argument("--here", action="store_true", help="run in this process, for a debugger")
    again.set_defaults(run=_replay)

    report = commands.add_parser("report", parents=[common], help="print a table of all checks")
    report.add_argument("ops", nargs="*", metavar="OP")
    report.add_argument("--profile", choices=PROFILES, default="ci")
    report.add_argument("--jobs", type=output.at_least(1), default=1, help="operators at a time")
    report.add_argument("--junit", type=Path, metavar="FILE", action="append", default=[],
                        help="read what tests recorded with pytest --junitxml; repeatable",
                        )  # fmt: skip
    report.add_argument("--json", action="store_true")
    report.set_defaults(run=_report)

    fuzzing.add(commands, common)

    tools = commands.add_parser("sanitize", parents=[common], help="run compute-sanitizer's tools")
    tools.add_argument("ops", nargs="*", metavar="OP")
    tools.add_argument("--tool", action="append", help="memcheck, racecheck, initcheck, synccheck")
    tools.add_argument("--ledger", default="", help="a file of known false findings")
    tools.set_defaults(run=_sanitize)

    ranks = commands.add_parser(
        "ranks", parents=[common], help="run DTensor's rules on real ranks: gloo, or NCCL on GPUs"
    )
    ranks.add_argument("ops", nargs="*", metavar="OP")
    ranks.add_argument("--ranks", type=output.at_least(2), default=2,
                       help="processes, each with a GPU of its own")  # fmt: skip
    ranks.add_argument("--device", choices=("cpu", "cuda"), help="by default GPUs, if any")
    written = ranks.add_mutually_exclusive_group()
    written.add_argument("--json", action="store_true")
    written.add_argument("--markdown", action="store_true", help="a page for the record")
    ranks.set_defaults(run=_ranks)

    mutate = commands.add_parser(
        "mutate", parents=[common], help="plant faults and see what finds them"
    )
    mutation.add_arguments(mutate)
    mutate.set_defaults(run=mutation.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
