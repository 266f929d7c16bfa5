"""``python -m cuda_ops.testing fuzz``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuda_ops.build import cache, threads
from cuda_ops.build.advice import dev_command
from cuda_ops.errors import CudaOpsError
from cuda_ops.output import INTERRUPTED, above_zero, at_least
from cuda_ops.testing.fuzzing import instrumented
from cuda_ops.testing.fuzzing.calls import Finding, why_not
from cuda_ops.testing.fuzzing.campaign import Campaign, Result
from cuda_ops.testing.fuzzing.judge import Judge
from cuda_ops.testing.subject import Origin, find

_NO_ATHERIS = (
    'fuzz needs atheris: pip install "cuda_ops[fuzz]"; without it, --by-chance draws calls by '
    "chance"
)
#: The exit statuses of one call that was judged; any other outcome says nothing of the operator.
_STATUSES = {"returned": 0, "refused": 0, "finding": 1}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command to a parser of commands."""
    parser = commands.add_parser(
        "fuzz", parents=[common], help="call operators with wrong arguments until one breaks"
    )
    parser.add_argument("ops", nargs="*", metavar="OP")
    parser.add_argument("--minutes", type=above_zero, default=1.0, help="how long (default: 1)")
    parser.add_argument("--corpus", type=Path, metavar="DIR",
                        help="keep the inputs that show something new")  # fmt: skip
    parser.add_argument("--jobs", type=at_least(1), default=1, help="processes at a time")
    parser.add_argument("--seed", type=int, default=1, help="what to draw first (default: 1)")
    parser.add_argument("--instrument", action="store_true",
                        help="build the bindings for it first: the fuzzer then sees their C++, and "
                        "AddressSanitizer watches it (gcc)")  # fmt: skip
    parser.add_argument("--by-chance", action="store_true", help="draw calls without atheris")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--again", metavar="LINE", help="repeat one call: OP: cuda_ops.OP(...)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    origin = Origin(tuple(arguments.root), arguments.file)
    if arguments.again:
        key = arguments.again.strip().partition(": ")[0]
        names: Sequence[str] = _names([key])
        Judge(find(key)).parsed(arguments.again)  # refuses it here, not in a process of its own
    else:
        names = _names(arguments.ops)
    has_atheris = importlib.util.find_spec("atheris") is not None
    if not has_atheris and not arguments.by_chance and not arguments.again:
        raise CudaOpsError(_NO_ATHERIS)
    engine = "chance" if arguments.by_chance else "atheris"
    built = instrumented.build(_pairs(names), origin) if arguments.instrument else None
    if arguments.json:  # what cannot be written must not cost a run
        if arguments.json.is_dir():
            raise CudaOpsError(f"--json {arguments.json}: expected a file, got a folder")
        arguments.json.touch()
    with tempfile.TemporaryDirectory(prefix="cuda_ops-fuzz-") as folder:
        corpus = arguments.corpus or Path(folder)
        corpus.mkdir(parents=True, exist_ok=True)
        campaign = Campaign(names, origin, corpus, engine, built, _say(arguments))
        if arguments.again:
            found = campaign.again(arguments.again)
            print(f"{found.form}: {found.text}" if found.text else found.form)
            return _STATUSES.get(found.form, 2)
        result = _together(campaign, arguments)
    print(result.summary, flush=True)
    if arguments.json:  # last: a disk may be full
        cache.write(arguments.json, json.dumps(result.as_json(), indent=2) + "\n", mode=None)
    return INTERRUPTED if campaign.stop.is_set() else int(bool(result.findings))


def _say(arguments: argparse.Namespace) -> Any:
    options = "".join(f" {word}" for word in Origin(tuple(arguments.root), arguments.file).options)
    options += " --instrument" if arguments.instrument else ""

    def say(finding: Finding) -> None:
        if ": " not in finding.line:
            print(f"FOUND  {finding.text}\n       {finding.line}", flush=True)
            return
        line = finding.line.replace("'", '"')
        again = f"python -m cuda_ops.testing fuzz{options} --again '{line}'"
        print(f"FOUND  {finding.text}\n       reproduce: {again}", flush=True)

    return say


def _together(campaign: Campaign, arguments: argparse.Namespace) -> Result:
    """Runs as many campaigns at a time as there are jobs; returns what all of them showed, and
    after Ctrl-C what they have shown so far.
    """
    with ThreadPoolExecutor(arguments.jobs) as pool:
        # Far apart, since a process that replaces another takes the next seed.
        seeds = [arguments.seed + 1000 * job for job in range(arguments.jobs)]
        runs = [pool.submit(campaign.run, arguments.minutes * 60, seed) for seed in seeds]
        try:
            for run in runs:
                threads.result(run)
        except BaseException as error:
            campaign.stop.set()
            if not isinstance(error, KeyboardInterrupt):
                raise
        whole = Result()
        for run in runs:
            whole.add(run.result())
    return whole


def _names(chosen: Sequence[str]) -> list[str]:
    """Returns the operators to call; prints those that have no calls to begin with."""
    from cuda_ops.registry import all_operators, operators_of, registry
    from cuda_ops.testing.subject import described

    names = operators_of(map(registry().key_in_command, chosen)) or [*all_operators(), *described()]
    reasons = {name: why_not(find(name)) for name in names}
    for name, reason in reasons.items():
        if reason:
            print(f"left out  {name}: {reason}")
    if not (fuzzable := [name for name, reason in reasons.items() if not reason]):
        why = "none of them can be called" if names else f"none is built: run {dev_command()}"
        raise CudaOpsError(f"no operator to call: {why}")
    return fuzzable


def _pairs(names: Sequence[str]) -> list[str]:
    """Returns the pairs of these operators that cuda_ops builds, and all that those call."""
    from cuda_ops.registry import registry

    found: list[str] = []
    waiting = [find(name).op for name in names]
    while waiting:
        op = waiting.pop()
        if op.foreign or op.guest or op.pair in found:
            continue
        found.append(op.pair)
        waiting += [find(registry().part_of(op, part)).op for part in op.calls]
    return sorted(found)
