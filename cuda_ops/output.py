"""What commands do with their output: a full disk is one line, JSON stands alone, tables fit, and
numbers are written in one way; and how they read a number and a file of lines.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table

#: The exit status of a command after Ctrl-C.
INTERRUPTED = 130
_Main = Callable[[Sequence[str] | None], int]


class _LostOutputError(BaseException):
    """Stdout cannot be written. Not an ``OSError``, which argparse keeps to itself."""


class _Stdout:
    """Stands in for stdout, whose errors look like those of any other file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _told_apart():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told_apart():
            self._stream.flush()


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # as of `| head`, which has seen enough
        raise _LostOutputError from None
    except OSError as error:
        raise _LostOutputError(f"error: cannot write the output: {error.strerror}") from None


def command(main: _Main) -> Callable[..., int]:
    """Ends a command with status 1 and one line on stderr where its output cannot be written, and
    with :data:`INTERRUPTED` after Ctrl-C.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        stdout = sys.stdout
        if stdout is None:
            print("error: cannot write the output: it is closed", file=sys.stderr)
            return 1
        try:
            with contextlib.redirect_stdout(_Stdout(stdout)):
                try:
                    return main(argv)
                except KeyboardInterrupt:
                    return INTERRUPTED
                finally:
                    sys.stdout.flush()
        except _LostOutputError as lost:
            # What is left over would fail once more when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
            if str(lost):
                print(lost, file=sys.stderr)
            return 1

    return run


def at_least(least: int) -> Callable[[str], int]:
    """Returns the ``type`` of an argument that is a whole number from ``least`` on."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (number := int(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")

    return read


def above_zero(text: str) -> float:
    """Reads an argument that is a finite number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a file of text.

    Raises:
        ValueError: a line is not UTF-8; the message names the file and the line.
    """
    data = path.read_bytes()
    try:
        return data.decode().splitlines()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{data[error.start]:02x}"
        raise ValueError(f"{path}:{number}: expected text in UTF-8, got {byte}") from None


@contextlib.contextmanager
def stdout_for_json(wanted: bool) -> Iterator[None]:
    """Sends to stderr what plugins and kernels print, if JSON is wanted on stdout afterwards."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr):
        kept = os.dup(1)
        os.dup2(2, 1)  # for code in C
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)


def keep_words(console: Console, shown: RenderableType) -> None:
    """Lets no table cut words on a narrow terminal, which wraps the lines instead."""
    if isinstance(shown, Group):
        for part in shown.renderables:
            keep_words(console, part)
    if isinstance(shown, Table):
        options = console.options.update(width=10_000)
        for column in shown.columns:
            cells = (Measurement.get(console, options, c) for c in (column.header, *column.cells))
            column.min_width = max(cell.minimum for cell in cells)


def time_text(seconds: float) -> str:
    """Returns three digits and the unit that fits.

    >>> time_text(3.21e-6), time_text(45.6e-6), time_text(0.00123)
    ('3.21 us', '45.6 us', '1.23 ms')
    """
    # Below the next unit even when rounded.
    factor, unit = next(
        (u for u in ((1e6, "us"), (1e3, "ms")) if seconds * u[0] < 999.5), (1.0, "s")
    )
    return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"


def size_text(size: float | None) -> str:
    """Returns ``"1.50 MiB"``: three digits and the prefix that fits.

    >>> size_text(1536), size_text(-3 << 20), size_text(12), size_text(None)
    ('1.50 KiB', '-3.00 MiB', '12 B', 'unknown')
    """
    if size is None:
        return "unknown"
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(size) >= 2**power:
            value = size / 2**power
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{size:.0f} B"


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  "
) -> list[str]:
    """Returns the lines of a table without borders, for a ``str``; the first ``left`` columns are
    text, the others numbers.
    """
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        indent + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]  # fmt: skip
