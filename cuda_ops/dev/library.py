"""``python -m cuda_ops library``: operators for programs without Python.

Prints where the library is that pip built, or writes one with the operators of the present sources.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cuda_ops import output, servers
from cuda_ops.build import cache, compiling, threads, toolchain
from cuda_ops.build.discovery import BUILTIN_ROOT, Pair, add_root_option
from cuda_ops.build.source_text import Kind
from cuda_ops.dev import project
from cuda_ops.errors import BuildError, CudaOpsError
from cuda_ops.names import HOME, unknown
from cuda_ops.registry import registry


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.output is None:
            if arguments.ops or arguments.root or arguments.arch:
                raise ValueError("OP, --root and --arch: expected -o DIR, where to write operators")
            print(installed(arguments.package))
        else:
            if arguments.package != HOME:
                raise ValueError(f"--package: expected no -o, got -o {arguments.output}")
            for root in arguments.root:
                registry().add_root(Path(root))
            archs = toolchain.parse_archs(arguments.arch) if arguments.arch else None
            print(write(chosen(arguments.ops, arguments.root), arguments.output, archs))
    except (CudaOpsError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def installed(package: str = HOME) -> Path:
    """Returns where the library is that pip built with a package.

    Raises:
        BuildError: there is none.
    """
    name = servers.name_of(package)
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    found = [BUILTIN_ROOT / "lib" / name] if package == HOME else []
    found += [path for folder in folders for path in sorted(folder.rglob(f"lib/{name}"))]
    for path in found:
        if path.is_file():
            return path.resolve()
    raise BuildError(
        f"package {package!r}: expected a file lib/{name}, got none; install the package again, or "
        "write a library with python -m cuda_ops library -o DIR"
    )


def write(keys: Iterable[str], folder: Path, archs: tuple[str, ...] | None = None) -> Path:
    """Builds operators and writes them into a folder, with the library that registers them there.

    Args:
        keys: those of their pairs. What they call in other pairs comes with them.
        folder: where to; it need not exist.
        archs: compute capabilities; without them those of the GPUs here.

    Returns:
        The library, ``libcuda_ops.so``, or ``libmy_ops.so`` where all are in that namespace.

    Raises:
        CudaOpsError: an operator does not build, or C++ cannot register it.
    """
    if folder.exists() and not folder.is_dir():
        raise BuildError(f"{folder}: expected a folder, got a file")
    pairs, keys = registry().pairs(), list(dict.fromkeys(keys))
    found = built(keys, archs)
    folder.mkdir(parents=True, exist_ok=True)
    copies: dict[Pair, Path] = {}
    for pair, library in found.items():
        copies[pair] = copy = folder.resolve() / pair.prebuilt.name
        if list(copies.values()).count(copy) > 1:
            raise BuildError(f"{pair.key}: expected one operator of this name, got several")
        cache.write(copy, library.read_bytes(), 0o755)
    spaces = {pairs[key].namespace for key in keys}
    path = folder.resolve() / servers.name_of(spaces.pop() if len(spaces) == 1 else HOME)
    if problems := servers.write(copies, path):
        lines = [f"{pair.key}: {problem}" for pair, problem in problems.items()]
        raise BuildError("\n".join([f"{path.name} is without", *lines]))
    return path


def built(keys: Sequence[str], archs: tuple[str, ...] | None) -> dict[Pair, Path]:
    """Builds pairs, and those that their operators call; returns their libraries.

    Raises:
        BuildError: there is no such pair, or it does not build.
    """
    pairs, found, waiting = registry().pairs(), dict[Pair, Path](), list(keys)
    for key in waiting:
        if key not in pairs:
            raise BuildError(unknown([key], pairs))
    while waiting:
        with threads.builders(toolchain.operators_at_once()) as submit:
            futures = [submit(compiling.build, pairs[key], archs) for key in waiting]
            done = [threads.result(future) for future in futures]
        for one in done:
            found[one.pair] = one.path
            if one.origin == "built":
                print(f"{one.pair.key}: built in {one.seconds:.1f} s", file=sys.stderr)
        called = (key for one in done for key in registry().called(one.pair, one.path))
        waiting = [key for key in dict.fromkeys(called) if pairs[key] not in found]
    return found


def chosen(names: Sequence[str], roots: Sequence[str]) -> list[str]:
    """Returns the keys of the operators that a command names, or else those of these roots, of the
    project in this folder or of cuda_ops that do not register themselves.
    """
    if names:
        return [*map(registry().key_in_command, names)]
    folders = {Path(root).resolve() for root in roots}
    if not folders:
        own = project.enter()
        folders = {BUILTIN_ROOT.resolve()} if own is None else {*project.roots(own)}
    return [
        key
        for key, pair in registry().pairs().items()
        if pair.root in folders and pair.kind is Kind.NATIVE
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ops library",
        description="Print where the library is that registers operators without Python, or write "
        "one with the operators of the present sources.",
        epilog="Without -o it is the library that pip built.",
    )
    parser.add_argument(
        "ops", nargs="*", metavar="OP", help="operators to write (default: all of the roots)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR",
        help="write the operators and the library that registers them into this folder",
    )  # fmt: skip
    add_root_option(parser)
    parser.add_argument("--arch", metavar="LIST", help="compute capabilities, such as '8.0;9.0a'")
    parser.add_argument(
        "--package", default=HOME, metavar="NAME",
        help="whose library to print, that pip built with it (default: cuda_ops)",
    )  # fmt: skip
    return parser
