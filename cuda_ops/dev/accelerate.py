"""``python -m cuda_ops accelerate``: what records gradients in C++, built for the torch in use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cuda_ops import output
from cuda_ops.build import cpp_autograd
from cuda_ops.errors import BuildError


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    _parser().parse_args(argv)
    try:
        print(cpp_autograd.found() or cpp_autograd.build())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m cuda_ops accelerate",
        description="Build what records gradients in C++ for the torch and the Python in use, and "
        "print where it is. It takes half a minute.",
        epilog="pip install -e . has built it already; a wheel, which fits every torch, cannot "
        f"have it. {cpp_autograd.SWITCH}=python does without it.",
    )
