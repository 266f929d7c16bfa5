"""The command line of ``compile_dev.py``: build what changed, load it, say how it went."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuda_ops import __version__, output
from cuda_ops.build import cache, compiling, debug, toolchain
from cuda_ops.build.advice import dev_command
from cuda_ops.build.discovery import BUILTIN_ROOT, PACKAGE, add_root_option, namespace_of
from cuda_ops.build.source_text import Kind
from cuda_ops.compile_ops import NOT_RUN, Row, compile_ops
from cuda_ops.dev import clangd, project
from cuda_ops.dev.scaffold import ELEMENTWISE, FORMS, new_pair, project_root
from cuda_ops.errors import CudaOpsError
from cuda_ops.names import keyed
from cuda_ops.registry import registry
from cuda_ops.spec import NO_REFERENCE, UNCHECKED_GRADIENT, WRONG_GRADIENT

#: What ``no reference`` means where the operator has two files alone.
ITS_OWN = "the CPU kernel is compared with itself, in float64"
#: How many files a line names, and the width of a table that goes to a file or another program.
_MOST_FILES, _WIDE = 2, 1000


def table(rows: Sequence[Row]) -> Table:
    grid = Table(
        "op", "build", "devices", "fake", "autograd", "max error", box=None, pad_edge=False
    )
    for row in rows:
        if row.error and not row.devices:  # not loaded
            grid.add_row(row.op, "[red]failed[/]", *["see below"] * 4)
            continue
        if row.note:
            grid.add_row(row.op, _built(row), row.note, *["a guest has none"] * 3)
            continue
        error = row.uncompared.partition(":")[0]
        if row.max_error is not None:
            error = f"{row.max_error:.1e}"
        if row.error:
            error = "[red]failed[/]"
        autograd = f"[red]{WRONG_GRADIENT}[/]" if row.has_wrong_gradient else row.autograd
        grid.add_row(row.op, _built(row), row.devices, row.fake, autograd, error)
    return grid


def _built(row: Row) -> str:
    built = f"{row.seconds:.1f} s" if row.built == "built" else row.built
    return f"{built} (debug)" if row.debug else built


def uncompared(rows: Sequence[Row]) -> list[str]:
    """Returns what the column of errors has no room for: a line for each reason."""
    rows = [row for row in rows if not row.error]
    lines = [f"{row.op}: {row.uncompared}" for row in rows if ":" in row.uncompared]
    lines += [f"{row.op}: {row.refused}" for row in rows if row.refused]
    lines += [
        f"{row.op}: gradient {row.gradient}"
        for row in rows
        if row.gradient.startswith(UNCHECKED_GRADIENT) and not row.uncompared
    ]
    if alone := [row.op for row in rows if row.uncompared == NO_REFERENCE]:
        where = _plugins(alone)
        lines.append(f"{NO_REFERENCE}: {ITS_OWN}; write cuda_ops_reference in {where} for another")
    return lines


def _plugins(keys: Sequence[str]) -> str:
    """Returns the files in which hooks of these pairs are found, as seen from this folder."""
    files = [registry().pairs()[key].plugin for key in keys]
    if any(cache.cache_dir() in file.parents for file in files):
        return "its plugin"  # that of a cell
    if len(files) > _MOST_FILES:
        files = [files[0].with_name("OP.py")]
    here = Path.cwd()
    shown = [file.relative_to(here) if file.is_relative_to(here) else file for file in files]
    return " or ".join(map(str, shown))


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parsed(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=arguments.json, highlight=False, soft_wrap=True)
    if arguments.completion:
        print(_completion(arguments.completion))
        return 0
    try:
        own = None if arguments.root else project.enter()
        if arguments.ops[:1] == ["new"]:
            return _new(arguments, console, own)
        if arguments.ops == ["clean"]:
            return _clean(console)
        if arguments.ops[:1] == ["adopt"] and arguments.form == ELEMENTWISE:
            return _adopt(arguments, console)
        if arguments.form != ELEMENTWISE:
            flag = f"--{arguments.form}"
            raise ValueError(f"{flag}: expected new, as in: {dev_command()} new my_op {flag}")
        if arguments.namespace:
            flag = f"--namespace {arguments.namespace}"
            raise ValueError(
                f"--namespace: expected new or adopt, as in: {dev_command()} new my_op {flag}"
            )
        for root in arguments.root:
            registry().add_root(Path(root))
        arguments.ops = [*map(registry().key_in_command, arguments.ops)]
        if own is not None and not arguments.ops:
            arguments.ops = project.operators(own)
        archs = toolchain.parse_archs(arguments.arch) if arguments.arch else None
        if arguments.watch and (arguments.debug or debug.asked(registry().pairs())):
            asked = "--debug" if arguments.debug else debug.VARIABLE
            raise ValueError(
                f"--watch: expected ordinary builds, which it times at every save, got {asked}; "
                f"run {dev_command()} --debug after a save"
            )
        with output.stdout_for_json(arguments.json):
            _say_what_is_left_aside(console)
            rows = _compile(arguments, archs, console)
            failed = any(row.error or row.has_wrong_gradient for row in rows)
            if arguments.check:
                failed |= not check(rows, console, arguments.verbose)
        if arguments.json:
            print(json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False))
        if arguments.watch and (
            watched := [row.op for row in rows if row.op in registry().pairs()]
        ):
            from cuda_ops.dev.watch import watch

            def checked(key: str) -> None:
                if arguments.check:
                    check([Row(key)], console, arguments.verbose)

            watch(watched, archs, console, checked)
        return int(failed)
    except (CudaOpsError, ValueError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        return 1


def _compile(arguments: Any, archs: tuple[str, ...] | None, console: Console) -> list[Row]:
    total = len(arguments.ops) or len(registry().pairs())
    with console.status(f"building {total} operators") as status:
        done: list[str] = []

        def progress(row: Row) -> None:
            done.append(row.op)
            if row.built == "built":
                console.print(f"built {row.op} in {_built(row)}")
            status.update(f"building: {len(done)} of {total} done")

        rows = compile_ops(
            arguments.ops,
            archs=archs,
            verbose=arguments.verbose,
            # --check compares more, in a process that may crash or hang.
            compare=not arguments.check,
            debug=arguments.debug,
            progress=progress,
        )
    clangd.write(registry().pairs().values(), archs or compiling.visible_archs())
    show(rows, console)
    return rows


def show(rows: Sequence[Row], console: Console) -> None:
    """Prints the table, and below it each error, each warning and what has no column."""
    grid = table(rows)
    output.keep_words(console, grid)
    if not console.is_terminal:
        console.width = _WIDE  # a pipe has no edge, and whatever reads it wants a row in a line
    console.print(grid)
    for row in rows:
        if row.error:
            said = row.error.removeprefix(f"{row.op}: ")
            console.print(f"\n[red]{row.op}[/]: {escape(said)}")
        elif row.warnings and row.built == "built":
            console.print(f"\n[yellow]{row.op}[/] {escape(chr(10).join(row.warnings))}")
        if row.has_wrong_gradient:
            more = f"{dev_command()} --check {row.op} says more"
            console.print(f"\n[red]{row.op}[/]: gradient {escape(row.gradient)}; {more}")
        for hint in row.hints if not row.error else ():
            console.print(f"\n{row.op}: {hint}", markup=False)
    for line in uncompared(rows):
        console.print(f"\n{line}", markup=False)
    if debugged := [row.op for row in rows if row.debug]:
        console.print(
            "\nA debug build is slow, so that a process loads it only where it is asked to: "
            f"{debug.variable_for(debugged)} python ...", markup=False,
        )  # fmt: skip
    if any("no nvcc" in row.devices for row in rows):
        console.print(
            "\nNo CUDA toolkit here, so .cu files were not compiled: install one, or run "
            f"{toolchain.INSTALL_NVCC}.", markup=False,
        )  # fmt: skip
    if any(NOT_RUN in row.devices for row in rows):
        text = "No GPU here: CUDA kernels were compiled, only CPU kernels were run."
        console.print(f"\n* {text}", markup=False)


def _say_what_is_left_aside(console: Console) -> None:
    """Prints a line for each installed root whose pairs an added root has too."""
    roots: dict[tuple[Path, Path], list[str]] = {}
    for installed, used in registry().left_aside():
        roots.setdefault((installed.root, used.root), []).append(used.key)
    for (installed_root, root), keys in roots.items():
        console.print(
            f"{', '.join(keys)}: taken from {root}; the installed copy in {installed_root} is left "
            "aside", markup=False,
        )  # fmt: skip


def check(rows: Sequence[Row], console: Console, verbose: bool = False) -> bool:
    """Runs the quick checks of every operator that was loaded and prints what they found, with
    ``verbose`` each check; says whether all passed.
    """
    from cuda_ops.testing import CHECKS, PROFILES, CheckEntry, check_op
    from cuda_ops.testing.checks import QUICK
    from cuda_ops.testing.report import not_looked_at
    from cuda_ops.testing.worker import Worker

    good, entries, failed = True, list[CheckEntry](), list[str]()
    with Worker(PROFILES["quick"].timeout) as worker:
        for row in rows:
            if row.error:
                continue
            pair = registry().pairs()[row.op]
            if not pair.is_declared:
                console.print(
                    f"{row.op}: not checked: nothing says what it should do; describe it with "
                    f"cuda_ops_guest in {pair.plugin}", markup=False,
                )  # fmt: skip
                good = False
                continue
            for name in registry().specs(row.op):
                with console.status(f"checking {name}"):
                    report = check_op(name, checks=QUICK, isolate=worker)
                console.print(str(report) if verbose else report.summary(), markup=False)
                row.checks.append(report.as_json())
                entries += report.entries
                good &= report.passed
                if names := ", ".join(entry.name for entry in report.failures):
                    failed.append(f"{name}: {names}")
    if entries:
        every = [check.name for check in CHECKS]
        console.print(not_looked_at(entries, every), markup=False)
    for line in failed:  # where the eye falls
        console.print(f"FAILED  {line}", markup=False, style="red")
    return good


def _new(arguments: Any, console: Console, own: Path | None) -> int:
    if len(arguments.ops) != 2:
        raise ValueError(f"new: expected one name, as in: {dev_command()} new swish_clip")
    roots = () if own is None else project.roots(own)
    root = Path(arguments.root[0]) if arguments.root else roots[0] if roots else project_root()
    for path in new_pair(arguments.ops[1], root, arguments.form, arguments.namespace):
        console.print(f"wrote {path}", markup=False)
    known = {BUILTIN_ROOT, *roots, *(pair.root for pair in registry().pairs().values())}
    where = "" if root.resolve() in known else f"--root {shlex.quote(str(root))} "
    key = keyed(namespace_of(root), arguments.ops[1])
    console.print(f"next: {dev_command()} {where}--watch {key}", markup=False)
    return 0


def _adopt(arguments: Any, console: Console) -> int:
    from cuda_ops.dev.adopt import adopt  # which every other call would import for nothing

    if len(arguments.ops) != 2:
        raise ValueError(f"adopt: expected one guest, as in: {dev_command()} adopt lltm")
    for root in arguments.root:
        registry().add_root(Path(root))
    pairs = registry().pairs()
    key = registry().key_in_command(arguments.ops[1])
    if key not in pairs:
        guests = ", ".join(one for one, pair in pairs.items() if pair.kind is not Kind.NATIVE)
        raise ValueError(f"adopt: no guest {arguments.ops[1]!r}; known: {guests or 'none'}")
    made = adopt(pairs[key], arguments.namespace)
    for path in made.texts:
        console.print(f"wrote {path}", markup=False)
    if made.left:
        console.print("left to do, marked with TODO(adopt) in the draft:", markup=False)
    for note in made.left:
        console.print(f"  {note}", markup=False)
    op = keyed(made.namespace, pairs[key].stem)
    root = shlex.quote(str(made.root))
    console.print(f"next: {dev_command()} --root {root} --check {op}", markup=False)
    return 0


def _clean(console: Console) -> int:
    removed, kept = cache.clean()
    freed, left = (sum(entry.size for entry in entries) / 1e6 for entries in (removed, kept))
    console.print(
        f"{cache.cache_dir()}: removed {len(removed)} libraries and builds, {freed:.1f} MB; left "
        f"{len(kept)}, {left:.1f} MB, of at most {cache.BOUND / 1e6:.0f} MB",
        markup=False,
    )
    return 0


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parses a command line. One that begins with new, adopt or clean has help of its own."""
    parsers = {"new": _new_parser, "adopt": _adopt_parser, "clean": _clean_parser}
    if not words or words[0] not in parsers:
        return _parser().parse_intermixed_args(words)
    # With what the others take, as they leave it.
    arguments = _parser().parse_args([])
    parsers[words[0]]().parse_args(words[1:], arguments)
    arguments.ops = [words[0], *arguments.ops]
    return arguments


def _new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_prog()} new",
        description="Write the two files of an operator: an elementwise one that builds and passes "
        "its checks as it is, unless a flag asks for another kind.",
        epilog="The files are kernels/NAME.cu and bindings/NAME.cpp of the root.",
    )
    parser.add_argument("ops", nargs=1, metavar="NAME", help="the operator's name")
    _add_forms(parser)
    parser.add_argument(
        "--namespace", metavar="NAME",
        help="of the operators of the root (default: that of its other pairs, or cuda_ops)",
    )  # fmt: skip
    parser.add_argument(
        "--root", metavar="DIR", action="append",
        help="the folder to write into, made if need be (default: that of the project here)",
    )  # fmt: skip
    return parser


def _adopt_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_prog()} adopt",
        description="Draft the two files of an operator from a guest: a pair that registers itself "
        "with PYBIND11_MODULE or TORCH_LIBRARY.",
    )
    parser.add_argument("ops", nargs=1, metavar="GUEST", help="the guest's name")
    parser.add_argument("--namespace", metavar="NAME", help="of the draft (default: adopted)")
    add_root_option(parser)
    return parser


def _clean_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"{_prog()} clean",
        description="Remove the libraries and builds that no present source needs.",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_prog(),
        description="Build what changed, load every operator, compare it with its reference.",
        epilog="compile_dev.py new OP writes a pair that builds and passes its checks. "
        "compile_dev.py adopt GUEST drafts one from a guest. "
        "compile_dev.py clean removes the libraries and builds that no present source needs.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="operators to build (default: all)")
    parser.add_argument(
        "--watch", action="store_true",
        help="on every save: rebuild, reload, compare, check the gradient, time; with --check, run "
        "its checks too",
    )  # fmt: skip
    _add_forms(parser, "new: ")
    parser.add_argument(
        "--namespace", default="", metavar="NAME",
        help="new: of the operators of the root (default: that of its other pairs, or cuda_ops); "
        "adopt: of the draft (default: adopted)",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true",
        help="run most checks of each operator, in about half a minute; --verbose lists each",
    )  # fmt: skip
    parser.add_argument(
        "--debug", action="store_true",
        help="make debug builds (-G -g, -O0) beside the ordinary ones, for cuda-gdb and gdb",
    )  # fmt: skip
    add_root_option(parser)
    parser.add_argument("--arch", metavar="LIST", help="compute capabilities, such as '8.0;9.0a'")
    parser.add_argument("--verbose", action="store_true", help="show the compilers' command lines")
    parser.add_argument("--json", action="store_true", help="print the table as JSON on stdout")
    parser.add_argument(
        "--version", action="version", version=f"cuda_ops {__version__}", help="print it and end"
    )
    parser.add_argument(
        "--completion", choices=("bash", "zsh", "tcsh"), help="print a completion script and end"
    )
    return parser


def _add_forms(parser: argparse.ArgumentParser, of: str = "") -> None:
    """Adds the flags of ``new``; ``of`` begins the help of each."""
    forms = parser.add_mutually_exclusive_group()
    for form, what in FORMS.items():
        forms.add_argument(
            f"--{form}", dest="form", action="store_const", const=form, default=ELEMENTWISE,
            help=f"{of}{what}, not an elementwise operator",
        )  # fmt: skip


def _prog() -> str:
    """Returns the command that was called: a completion script serves one command."""
    called = Path(sys.argv[0])
    installed = called.name == "cuda-ops" or PACKAGE in called.resolve().parents  # python -m
    return "cuda-ops" if installed else "compile_dev.py"


def _completion(shell: str) -> str:
    """Returns the script for ``eval``, with the operator names of this moment."""
    import shtab

    parser = _parser()
    names = ["new", "adopt", "clean", *registry().pairs()]
    next(a for a in parser._actions if a.dest == "ops").choices = names
    script: str = shtab.complete(parser, shell)
    return script
