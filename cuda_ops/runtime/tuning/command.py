"""``python -m cuda_ops tune``: measures candidates, shows and forgets what was chosen."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuda_ops import output
from cuda_ops.benchmarking.command import regex
from cuda_ops.build.discovery import add_root_option
from cuda_ops.errors import CudaOpsError
from cuda_ops.registry import registry
from cuda_ops.runtime.arguments import loaded_key
from cuda_ops.runtime.tuning import choices, search
from cuda_ops.runtime.tuning.choices import Key, Stored
from cuda_ops.runtime.tuning.key import device_and_driver, key_of, made_from
from cuda_ops.spec import BenchmarkCase, Candidates, OpSpec

FAILED, REFUSED = 1, 2


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    width = None if sys.stdout.isatty() else 160
    console = Console(highlight=False, soft_wrap=True, width=width)
    try:
        for root in arguments.root:
            registry().add_root(root)
        keys = [registry().key_in_command(name) for name in arguments.ops]
        if arguments.forget or arguments.show:
            _check_known(keys)
        if arguments.forget:
            return _forget(keys, console)
        if not arguments.show:
            if not keys:
                raise ValueError("tune: expected an operator, --show or --forget, got none")
            with output.stdout_for_json(arguments.json):
                right = _tune(keys, arguments.case, Console(stderr=arguments.json, width=width))
        else:
            right = True
        _show(keys, arguments.json, console)
        return 0 if right else FAILED
    except (CudaOpsError, ValueError) as error:
        Console(stderr=arguments.json, width=width).print(f"[red]error:[/] {escape(str(error))}")
        return REFUSED


def _tune(keys: Sequence[str], pattern: str, console: Console) -> bool:
    """Measures the benchmark cases of operators, one of each bucket; says whether none failed."""
    from cuda_ops.benchmarking.capacity import too_large
    from cuda_ops.benchmarking.kit import cases_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if search.mode() == "off":
        raise ValueError(f"tune: {search.SWITCH}=off; set it to stored or on")
    if device.type == "cpu":
        console.print("no GPU here: candidates are measured on the CPU, for the CPU alone")
    right = True
    for key in keys:
        spec, library = search.found(key)
        offered = search.offered_by(spec, None)
        cases = [case for case in cases_of(spec, registry().plugins) if not case.backward]
        asked = [case for case in cases if re.search(pattern, case.label)]
        if not asked:
            listed = "; ".join(dict.fromkeys(case.label for case in cases)) or "none"
            raise ValueError(
                f"tune: no case of {key} has {pattern!r} in its label; it has: {listed}"
            )
        seen: set[Key] = set()
        for case in asked:
            if reason := too_large(case, device):
                console.print(f"{key} {case.label}: left out: {reason}", markup=False)
                continue
            right &= _tune_case(spec, library, offered, case, device, seen, console)
    return right


def _tune_case(
    spec: OpSpec,
    library: Path,
    offered: Candidates,
    case: BenchmarkCase,
    device: torch.device,
    seen: set[Key],
    console: Console,
) -> bool:
    where = f"{spec.key} {case.label}"
    inputs = tuple(case.make_inputs(device))
    for position, shared in (case.make_shared(device) if case.make_shared else {}).items():
        inputs = (*inputs[:position], shared, *inputs[position + 1 :])
    inputs = (*inputs, *_keywords(spec, case, len(inputs)))
    key = key_of(spec, library, inputs, offered)
    if key in seen:
        console.print(f"{where}: the same bucket as a case before", markup=False)
        return True
    seen.add(key)
    with console.status(escape(f"{where}: measuring")):
        choice = search.tune(spec, offered, inputs, anew=True)
    console.print(f"{where}: {choice.name}: {choice.reason}", markup=False)
    for name, why in choice.refused.items():
        console.print(f"{where}: refused {name!r}: {why}", markup=False)
    return not choice.refused


def _keywords(spec: OpSpec, case: BenchmarkCase, given: int) -> tuple[Any, ...]:
    """Returns a case's keywords as the arguments that follow those given by position."""
    if not case.keywords:
        return ()
    names = spec.argument_names[given:]
    last = max(names.index(name) for name in case.keywords)
    defaults = {argument.name: argument.default_value for argument in spec.parsed.arguments}
    return tuple(case.keywords.get(name, defaults[name]) for name in names[: last + 1])


def _check_known(keys: Sequence[str]) -> None:
    """Raises ValueError for a key of which nothing is stored and that is no operator's."""
    known = {*choices.operators(), *registry().pairs()}
    for key in keys:
        if key not in known:
            loaded_key("tune", key)


def _forget(keys: Sequence[str], console: Console) -> int:
    for key in keys or choices.operators():
        count = choices.forget(key)
        console.print(f"{key}: forgot {count} choice{'s' * (count != 1)}", markup=False)
    return 0


def _show(keys: Sequence[str], as_json: bool, console: Console) -> None:
    found = [one for op in (keys or choices.operators()) for one in choices.stored(op)]
    if as_json:
        listed = [{**asdict(one), "unused": _why_unused(one)} for one in found]
        print(json.dumps(listed, indent=1))
        return
    if not found:
        console.print(f"nothing is stored in {choices.path_of('').parent}", markup=False)
        return
    table = Table("op", "dtype", "rows", "columns", "device", "choice", "used here", "why")
    for one in found:
        rows, columns = map(_range, one.key.bits)
        cells = one.key.op, one.key.dtype, rows, columns, one.key.device, one.name
        table.add_row(*map(escape, (*cells, _why_unused(one) or "yes", one.reason)))
    output.keep_words(console, table)
    console.print(table)


def _why_unused(one: Stored) -> str:
    """Returns why a choice is not used by this process; nothing if it is."""
    if search.mode() == "off":
        return f"no, {search.SWITCH}=off"
    where = device_and_driver()
    if where is None or one.key.device != where[0]:
        return "no, another device"
    if one.key.driver != where[1]:
        return "no, another driver"
    try:
        _, library = search.found(one.key.op)
    except (CudaOpsError, ValueError):
        return "no, no such operator"
    made = made_from(library)
    if made is None or made[0] != one.key.source:
        return "no, another source"
    return "" if made[1] == one.key.build else "no, another build"


def _range(bits: int) -> str:
    if bits < 2:
        return str(bits)
    return f"{1 << (bits - 1)} to {(1 << bits) - 1}" if bits < 31 else f"{1 << 30} or more"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ops tune",
        description="Measure launch configurations that operators offer, and keep the best one.",
        epilog=f"exit status: {FAILED} if a candidate was refused, {REFUSED} if nothing could be "
        "measured",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="operators to measure, or to show")
    parser.add_argument(
        "--case", metavar="REGEX", type=regex, default="",
        help="only benchmark cases whose label matches, such as '4096x'",
    )  # fmt: skip
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument("--show", action="store_true", help="measure nothing, show what is stored")
    stored.add_argument(
        "--forget", action="store_true", help="remove what is stored, of all operators without OP"
    )
    parser.add_argument("--json", action="store_true", help="show what is stored as JSON")
    add_root_option(parser, Path)
    return parser
