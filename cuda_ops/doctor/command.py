"""``python -m cuda_ops doctor``: find out what is wrong with an installation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cuda_ops import output
from cuda_ops.build.discovery import add_root_option, root_problem
from cuda_ops.doctor.findings import findings
from cuda_ops.doctor.gather import UnknownError, gather
from cuda_ops.doctor.report import as_json, show


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 where something is broken."""
    arguments = _parser().parse_args(argv)
    for root in arguments.root:
        if problem := root_problem(Path(root).resolve()):
            print(f"error: --root: {problem}", file=sys.stderr)
            return 2
    console = Console(highlight=False, soft_wrap=True)
    try:
        with Console(stderr=True).status("looking at compilers, GPUs and operators"):
            facts = gather(arguments.ops, arguments.root)
    except UnknownError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = findings(facts)
    if arguments.json:
        print(as_json(facts, found))
    else:
        show(facts, found, console)
    return int(any(finding.level == "broken" for finding in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ops doctor",
        description="Say what an installation is made of, what is wrong with it, and which command "
        "mends that.",
        epilog="It builds nothing and runs no operator. What may crash or hang is looked at in "
        "another process. The exit status is 1 where something is broken.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="operators to look at (default: all)")
    add_root_option(parser)
    parser.add_argument(
        "--json", action="store_true", help="print facts and findings as JSON on stdout"
    )
    return parser
