"""``python -m cuda_ops COMMAND``: the commands of an installed cuda_ops."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from cuda_ops import __version__, output
from cuda_ops.errors import CudaOpsError

#: By name: the module whose ``main`` it is, the arguments that it gets first, and what it does.
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "dev": (
        "cuda_ops.dev.command", (),
        "build what changed, load it, compare it with its reference (also: cuda-ops)",
    ),
    "init": ("cuda_ops.dev.init", (), "write a package of your own with one operator"),
    "new": ("cuda_ops.dev.command", ("new",), "write the two files of an operator"),
    "adopt": (
        "cuda_ops.dev.command", ("adopt",), "draft the two files of an operator from a guest",
    ),
    "clean": (
        "cuda_ops.dev.command", ("clean",), "remove libraries and builds that nothing needs",
    ),
    "accelerate": (
        "cuda_ops.dev.accelerate", (), "build what records gradients in C++ for the torch in use",
    ),
    "doctor": (
        "cuda_ops.doctor.command", (),
        "say what is wrong with an installation, and which command mends it",
    ),
    "library": (
        "cuda_ops.dev.library", (), "print or write the library that C++ programs open",
    ),
    "export": (
        "cuda_ops.dev.export", (), "write operators in the layout of Hugging Face's kernels",
    ),
    "testing": (
        "cuda_ops.testing.__main__", (),
        "replay a sample, report all checks, fuzz, run compute-sanitizer or ranks, plant faults",
    ),
    "benchmarking": ("cuda_ops.benchmarking.command", (), "measure operators"),
    "tune": (
        "cuda_ops.runtime.tuning.command", (),
        "choose launch configurations by measuring, show them",
    ),
    "profile": (
        "cuda_ops.runtime.tracing.command", (),
        "trace a script, a module or an operator, and print where the time went",
    ),
}  # fmt: skip


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names; returns its exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(given[:1])
    module, first, _ = COMMANDS[arguments.command]
    if arguments.command != "doctor":  # which also runs where torch or the project is broken
        project = importlib.import_module("cuda_ops.dev.project")  # torch comes with it
        try:
            project.enter()
        except CudaOpsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    status: int = importlib.import_module(module).main([*first, *given[1:]])
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ops",
        description="Two files become a PyTorch operator. Each command has --help.",
        epilog="pytest --cuda-ops OP runs every check of an operator as a test.",
    )
    parser.add_argument("--version", action="version", version=f"cuda_ops {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, _, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning)
    return parser


if __name__ == "__main__":
    sys.exit(main())
