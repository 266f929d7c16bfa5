"""``%%cuda_op``: an operator in a notebook's cell. IPython brings itself; nothing else needs it."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from cuda_ops.build.origins import Origin
from cuda_ops.compile_ops import Row
from cuda_ops.dev.command import check, show
from cuda_ops.dev.strings import Source, cell_of, define, raise_first
from cuda_ops.errors import CudaOpsError, DiscoveryError, ResultError
from cuda_ops.registry import registry

#: Part by the word that begins it in a cell, as in ``// --- kernel``.
_WORDS = {"binding": "cpp", "kernel": "cu", "plugin": "plugin"}
_BORDER = re.compile(rf"\s*(?://|#)\s*---+\s*({'|'.join(_WORDS)})s?\b[\s-]*")
_COMMENT = re.compile(r"\s*(//.*)?")


def load_ipython_extension(shell: Any) -> None:
    """Adds ``%%cuda_op`` to an IPython shell: what ``%load_ext cuda_ops`` does.

    Args:
        shell: the ``InteractiveShell``.

    Example::

        %load_ext cuda_ops
    """

    def cuda_op(line: str, cell: str) -> None:
        frames = inspect.stack(context=0)
        _run(next(filter(None, (cell_of(frame.filename) for frame in frames)), "cell"), line, cell)

    cuda_op.__doc__ = _parser().format_help()
    shell.register_magic_function(cuda_op, magic_kind="cell", magic_name="cuda_op")


def parts_of(cell: str, label: str, whole: str = "cpp") -> dict[str, Source]:
    """Splits a cell at lines such as ``// --- kernel``.

    Args:
        cell: its text below the line with ``%%cuda_op``.
        label: how messages call it.
        whole: the part that a cell without such a line is.

    Raises:
        DiscoveryError: there is code before the first one, or a part comes twice.
    """
    parts: dict[str, Source] = {}
    seen: set[str] = set()
    lines = cell.splitlines(keepends=True)
    borders = [(i, found[1]) for i, line in enumerate(lines) if (found := _BORDER.fullmatch(line))]
    if not borders:
        return {whole: Source(cell, Origin(label, 2))}
    for i, line in enumerate(lines[: borders[0][0]]):
        if not _COMMENT.fullmatch(line.rstrip("\n")):
            raise DiscoveryError(
                f"{label}:{i + 2}: expected nothing before {lines[borders[0][0]].strip()!r}, got "
                f"{line.strip()!r}; put a line such as '// --- binding' above it"
            )
    ends = [*(i for i, _ in borders[1:]), len(lines)]
    for (start, word), end in zip(borders, ends, strict=True):
        if word in seen:
            raise DiscoveryError(f"{label}:{start + 2}: expected one {word}, got a second one")
        seen.add(word)
        text = "".join(lines[start + 1 : end])
        if text.strip():
            parts[_WORDS[word]] = Source(text, Origin(label, start + 3))
    return parts


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from IPython.core.error import UsageError

        raise UsageError(f"{message}\n{self.format_usage()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="%%cuda_op",
        add_help=False,
        description="Build the cell as an operator, load it, compare it with its reference. "
        "Run again, it reloads: functions obtained earlier run the new code.",
        epilog="A line '// --- kernel', '// --- binding' or '# --- plugin' begins a part; a cell "
        "without such a line is a binding. The operator is cuda_ops.NAME.",
    )
    parser.add_argument("name", metavar="NAME", help="the operator's name")
    parser.add_argument("--check", action="store_true", help="run the quick checks too")
    parser.add_argument("--time", action="store_true", help="time the largest benchmark case too")
    parser.add_argument(
        "--cu", action="store_true", help="the cell is a kernel that registers itself: a guest"
    )
    parser.add_argument("--root", metavar="DIR", type=Path, help="keep the files in this folder")
    return parser


def _run(label: str, line: str, cell: str) -> None:
    parser = _parser()
    try:
        words = shlex.split(line)
    except ValueError as error:  # an open quote
        parser.error(str(error))
    arguments = parser.parse_args(words)
    console = Console(highlight=False, soft_wrap=True, force_jupyter=False)
    try:
        sources = parts_of(cell, label, "cu" if arguments.cu else "cpp")
        # The checks compare more, in a process that may crash or hang.
        rows = define(arguments.name, sources, arguments.root, compare=not arguments.check)
        raise_first(rows)
        show(rows, console)
        if arguments.check and not check(rows, console):
            raise ResultError(f"{rows[0].op}: failed its checks, see above; it is loaded")
        if arguments.time:
            console.print(_timed(rows[0]), markup=False)
    except CudaOpsError as error:
        # Instead of a traceback through cuda_ops, which has nothing to do with the cell.
        text = [f"{type(error).__name__}: {_with_lines(str(error), label, cell)}"]
        vars(error)["_render_traceback_"] = lambda *_: text
        raise


def _with_lines(message: str, label: str, cell: str) -> str:
    """Returns a message with the line of the cell below each place that it names first."""
    lines, shown, seen = cell.splitlines(), [], set()
    for line in message.splitlines():
        shown.append(line)
        found = re.match(rf"{re.escape(label)}[:(](\d+)", line)
        number = int(found[1]) if found else 0
        if 2 <= number < len(lines) + 2 and number not in seen:
            seen.add(number)
            shown.append(f"{number:6} | {lines[number - 2]}")
    return "\n".join(shown)


_last: dict[str, Any] = {}


def _timed(row: Row) -> str:
    from cuda_ops.dev.watch import Save, home_of, timed  # which imports the benchmark kit

    key, device = row.op, "cuda" if torch.cuda.is_available() else "cpu"
    if not registry().pairs()[key].is_declared:
        return f"{key}: not timed: a guest says nothing of its arguments"
    error = row.uncompared if row.max_error is None else row.max_error
    op = next(iter(registry().specs(key).values()))
    taken, rate = timed(op, home_of(op, device))
    save = Save(row.seconds, error, taken, rate, None, None, gradient=row.gradient)
    line = save.line(key, _last.get(key))
    _last[key] = save
    return line
