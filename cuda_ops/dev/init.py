"""``python -m cuda_ops init my_ops``: a package of your own with one operator, ready to grow.

``examples/third_party`` is such a package.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cuda_ops import output
from cuda_ops.build.discovery import illegal_name
from cuda_ops.dev.scaffold import TEMPLATES, new_pair
from cuda_ops.errors import CudaOpsError, DiscoveryError
from cuda_ops.names import HOME, fault_of_namespace

#: What a package has beside its pairs, and the template of each file.
FILES = {
    ".gitignore": "project_gitignore.txt",
    ".github/workflows/test.yml": "project_workflow.yml.txt",
    "README.md": "project_readme.md.txt",
    "pyproject.toml": "project_pyproject.toml.txt",
    "setup.py": "project_setup.py.txt",
    "@package@/__init__.py": "project_init.py.txt",
    "@package@/plugin.py": "project_plugin.py.txt",
    "tests/test_@package@.py": "project_tests.py.txt",
}
#: Modules of the package, which its functions of the same name would hide behind.
_MODULES = ("plugin", "src")
#: The operator, unless ``--op`` names another.
FIRST = "my_op"


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    folder: Path = arguments.directory
    try:
        for path in new_project(folder, arguments.op):
            print(f"wrote {path}")
    except CudaOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("next:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    print(f"  python -m cuda_ops dev --watch {arguments.op}")
    print("  pip install --no-build-isolation --no-deps -e . && pytest")
    return 0


def new_project(folder: Path, op: str = FIRST) -> list[Path]:
    """Writes a package with one elementwise operator; its name is that of the folder.

    Args:
        folder: where to; it must not exist, or be empty.
        op: the name of the operator.

    Returns:
        The files, sorted. Either all of them are there or none.

    Raises:
        DiscoveryError: a name cannot be used, the folder is not empty, or nothing can be written
            there.

    Example::

        new_project(Path("my_ops"), "swish_clip")
    """
    package = folder.resolve().name
    if problem := fault_of_package(package, folder):
        raise DiscoveryError(f"{problem}; choose another")
    if problem := illegal_name(op, "choose another with --op"):
        raise DiscoveryError(problem)
    if op in _MODULES:
        raise DiscoveryError(
            f"operator name {op!r} is taken by the module {package}.{op}; choose another with --op"
        )
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise DiscoveryError(
                f"{folder}: expected no folder or an empty one, got one with files"
            )
        if folder.exists() and not folder.is_dir():
            raise DiscoveryError(f"{folder}: expected no folder or an empty one, got a file")
        target = folder.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # A shell may stand in an empty folder, which therefore stays and is filled.
        is_there = target.is_dir()
        beside = target if is_there else target.parent
        with tempfile.TemporaryDirectory(dir=beside, prefix=f".{package}-") as work:
            made = Path(work) / package
            made.mkdir()
            new_pair(op, made / package / "src", namespace=package)
            for name, text in texts(package, op).items():
                path = made / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            for path in made.iterdir() if is_there else ():
                path.rename(target / path.name)
            if not is_there:
                made.rename(target)
    except OSError as error:
        where = error.filename or folder
        raise DiscoveryError(f"{where}: cannot be written: {error.strerror}") from error
    return sorted(folder / path.relative_to(target) for path in target.rglob("*") if path.is_file())


def texts(package: str, op: str) -> dict[str, str]:
    """Returns the files of a package but for its pairs, by path."""

    def named(text: str) -> str:
        return text.replace("@package@", package).replace("@op@", op)

    made = {
        named(path): named((TEMPLATES / template).read_text(encoding="utf-8"))
        for path, template in FILES.items()
    }
    return {**made, "README.md": re.sub(r"(?s)```\n(.*?)```", _aligned, made["README.md"])}


def _aligned(block: re.Match[str]) -> str:
    """Returns lines of two columns, which spaces part, with the second one below each other."""
    rows = [re.split(" {2,}", line, maxsplit=1) for line in block[1].splitlines()]
    width = max(len(first) for first, *_ in rows)
    lines = ("   ".join((first.ljust(width), *more)) for first, *more in rows)
    return "\n".join(["```", *lines, "```"])


def fault_of_package(name: str, folder: Path) -> str:
    """Returns why a package in this folder cannot have this name; empty where it can."""
    shown = f"package name {name!r}"
    if fault := fault_of_namespace(name):
        return fault.replace(f"namespace {name!r}", shown)
    if name in (HOME, "torch"):
        return f"{shown} is that of {name} itself"
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # it is there, and broken
        return f"{shown} is that of a module which is installed here"
    if found is None:
        return ""
    places = [Path(place).resolve() for place in found.submodule_search_locations or ()]
    if found.origin is None and places == [folder.resolve()]:  # an empty folder in this one
        return ""
    return f"{shown} is that of a module which is installed here, {found.origin or places[0]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ops init",
        description="Write a package of your own with one operator: build, tests, CI and all.",
        epilog="In its folder, python -m cuda_ops dev builds and checks it without an install.",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR",
        help="the folder to write, whose name is that of the package and of its namespace",
    )  # fmt: skip
    parser.add_argument(
        "--op", default=FIRST, metavar="NAME", help=f"the operator's name (default: {FIRST})"
    )
    return parser
