"""What every command does with its output, and the one that lists the others."""

from __future__ import annotations

import doctest
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_python
from rich.console import Console, Group
from rich.table import Table

from cuda_ops import __main__ as commands
from cuda_ops import __version__, output

FULL = Path("/dev/full")
REPO = Path(__file__).parent.parent


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line_and_status_1(unbuffered: str) -> None:
    command = [sys.executable, "-m", "cuda_ops", "--help"]
    with FULL.open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            cwd=REPO, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.stderr == "error: cannot write the output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["--help", "build --json silu"])
def test_closed_output_is_one_line_and_status_1(command: str) -> None:
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m cuda_ops {command} >&-", shell=True,
        stderr=subprocess.PIPE, text=True, timeout=60, check=False, cwd=REPO,
    )  # fmt: skip
    assert done.stderr == "error: cannot write the output: it is closed\n"
    assert done.returncode == 1


def test_a_reader_that_has_seen_enough_is_told_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return unused.fileno()

    with Path("/dev/null").open("w") as unused, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        assert output.command(lambda argv: print("a table") or 0)(None) == 1
    assert capfd.readouterr() == ("", "")


def test_every_command_is_listed_and_reached() -> None:
    listed = run_python("-m", "cuda_ops", "--help").stdout
    for name in commands.COMMANDS:
        assert f"    {name} " in listed or f"    {name}\n" in listed
    assert run_python("-m", "cuda_ops", "--version").stdout == f"cuda_ops {__version__}\n"
    done = run_python("-m", "cuda_ops", "new", "build")
    assert done.returncode == 1 and "taken by the module cuda_ops.build" in done.stdout
    assert run_python("-m", "cuda_ops").returncode == 2


def test_no_word_of_a_table_is_cut_on_a_narrow_terminal() -> None:
    table = Table("op", "max error", box=None)
    table.add_row("an_operator", "1.0e-07")
    console = Console(file=io.StringIO(), width=10, soft_wrap=True)  # as commands have it
    output.keep_words(console, Group("text", table))
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    assert {"an_operator", "error", "1.0e-07"} <= set(console.file.getvalue().split())


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (10 << 20, "10.0 MiB"),
     (100 << 30, "100 GiB"), (-5 << 20, "-5.00 MiB"), (3 << 40, "3.00 TiB"), (None, "unknown")],
)  # fmt: skip
def test_sizes_are_told_with_three_digits(size: int | None, text: str) -> None:
    assert output.size_text(size) == text


def test_columns_of_a_table_line_up() -> None:
    assert output.table_lines(("a", "b"), [("long", "1"), ("x", "100")]) == [
        "  a       b", "  long    1", "  x     100",
    ]  # fmt: skip


def test_examples_in_docstrings_are_true() -> None:
    found = doctest.testmod(output)
    assert found.failed == 0 and found.attempted == 2
