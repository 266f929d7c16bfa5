"""Cells: ``%%cuda_op`` in a shell of IPython, and the notebook of the examples, executed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_ops
from cuda_ops.build import cache
from cuda_ops.dev import magic, strings
from cuda_ops.errors import BuildError, DiscoveryError, ResultError

pytest.importorskip("IPython")

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

X = torch.tensor([1.0, 2.0, 3.0])
NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebook" / "operator.ipynb"
BODY = """
// Scales x.
// --- binding
#include "binding.h"
using namespace cuda_ops;
Tensor f(const Tensor& x) {
  return elementwise_cpu([](double v) { return v * @factor@; }, x);
}
CUDA_OPS(library) {
  library.op("@name@(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<f>();
}
# --- plugin
from cuda_ops.hookspecs import hookimpl

@hookimpl
def cuda_ops_reference(op):
    return lambda x: x * @expected@
"""
_numbers = itertools.count()


class Shell:
    """Runs cells, and keeps what they print."""

    def __init__(self, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
        self._shell, self._capsys = shell, capsys
        self.name = f"celled_{next(_numbers)}"
        self.printed = ""

    def run(self, cell: str) -> BaseException | None:
        result = self._shell.run_cell(cell, store_history=True)
        self.printed = re.sub(r"\x1b\[[\d;]*m", "", self._capsys.readouterr().out)
        return result.error_before_exec or result.error_in_exec

    def op(self, factor: str, expected: str = "2", options: str = "") -> BaseException | None:
        body = BODY.replace("@name@", self.name).replace("@factor@", factor)
        body = body.replace("@expected@", expected)
        return self.run(f"%%cuda_op {self.name} {options}{body}")

    @property
    def count(self) -> int:
        return self._shell.execution_count


@pytest.fixture
def shell(
    quick_compiler: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    roots_for_now: None,
) -> Iterator[Shell]:
    monkeypatch.setenv("CXX", str(quick_compiler))
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path_factory.mktemp("a cache")))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
    monkeypatch.setattr(strings, "_home", None)
    monkeypatch.setattr(strings, "_own", {})
    made = InteractiveShell.instance()
    made.history_manager.enabled = False
    shell = Shell(made, capsys)
    assert shell.run("%load_ext cuda_ops") is None
    yield shell
    made.extension_manager.loaded.discard("cuda_ops")
    InteractiveShell.clear_instance()


def test_a_cell_is_an_operator_and_reloads(shell: Shell) -> None:
    assert shell.op("2") is None
    assert re.search(rf"^{shell.name} +[\d.]+ s +cpu +yes .* 0\.0e\+00", shell.printed, re.M)
    function = getattr(cuda_ops, shell.name)
    assert torch.equal(function(X), X * 2)
    assert shell.op("2") is None and re.search(rf"^{shell.name} +cached", shell.printed, re.M)
    assert shell.op("3", "3", "--time") is None
    assert torch.equal(function(X), X * 3)
    line = rf"^{shell.name}: [\d.]+ s, max error \S+, gradient none, [\d.]+ us"
    assert re.search(line, shell.printed, re.M)


def test_an_error_shows_the_line_of_the_cell(shell: Shell) -> None:
    assert shell.op("2") is None
    number = shell.count
    error = shell.op("undeclared")
    assert isinstance(error, BuildError)
    said = rf"^In\[{number}\]:7:\d+: error: .undeclared. .*\n     7 \|   return elementwise_cpu"
    assert re.search(said, shell.printed, re.M), shell.printed
    assert shell.printed.startswith(f"BuildError: {shell.name}: does not compile:\n")
    assert str(cache.cache_dir()) not in shell.printed
    assert torch.equal(getattr(cuda_ops, shell.name)(X), X * 2)
    # A string in a cell too.
    number = shell.count
    error = shell.run(
        f'import cuda_ops\n\ncuda_ops.inline("{shell.name}", r"""\n'
        '#include "binding.h"\nint i = undeclared;\nCUDA_OPS(library) {}\n""")'
    )
    assert f"\nIn[{number}]:5:9: error" in str(error)


def test_check_shows_the_checks(shell: Shell) -> None:
    assert shell.op("2", "2", "--check") is None
    assert re.search(rf"^{shell.name}: \d+ passed, \d+ not run", shell.printed, re.M)
    error = shell.op("2", "5", "--check")
    assert isinstance(error, ResultError)
    assert re.search(r"^FAILED +reference\[cpu\]: ", shell.printed, re.M)
    assert f"ResultError: {shell.name}: failed its checks, see above" in shell.printed
    assert isinstance(shell.op("2", "7"), ResultError)
    assert "wrong on cpu" in shell.printed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: NAME"),
        ("one --what", "unrecognized arguments: --what"),
        ("one 'two", "No closing quotation"),
    ],
)
def test_a_wrong_option_is_one_line(shell: Shell, line: str, message: str) -> None:
    error = shell.run(f"%%cuda_op {line}\nint f();")
    assert isinstance(error, UsageError) and message in str(error)


def test_a_cell_without_borders_is_one_part(shell: Shell) -> None:
    text = "int f();\n"
    for options, suffix in (("", "cpp: registers nothing"), ("--cu", "cu: nothing binds this")):
        number = shell.count
        error = shell.run(f"%%cuda_op {shell.name} {options}\n{text}")
        assert isinstance(error, DiscoveryError)
        assert f"In[{number}]: {suffix.partition(': ')[2]}" in str(error)


def test_parts_know_their_lines() -> None:
    cell = "\n// --- kernel\n\nK\n// --- Binding of it\n//---- bindings ----\nB\n"
    found = magic.parts_of(cell, "In[1]")
    assert {part: (one.text, one.origin.line) for part, one in found.items()} == {
        "cu": ("\nK\n// --- Binding of it\n", 4),
        "cpp": ("B\n", 8),
    }
    with pytest.raises(DiscoveryError, match=r"In\[1\]:2: expected nothing before '// --- kernel'"):
        magic.parts_of("int f();\n// --- kernel\n", "In[1]")
    with pytest.raises(DiscoveryError, match=r"In\[1\]:4: expected one kernel, got a second"):
        magic.parts_of("// --- kernel\n\n// --- kernel\n", "In[1]")


def test_help_lists_every_option() -> None:
    registered: dict[str, Any] = {}

    class Recorder:
        def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
            registered[magic_name] = function

    cuda_ops.load_ipython_extension(Recorder())
    for option in ("--check", "--time", "--cu", "--root DIR", "NAME"):
        assert option in registered["cuda_op"].__doc__


@pytest.mark.slow
def test_the_notebook_of_the_examples_runs_as_it_is_shown(
    quick_compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("CXX", str(quick_compiler))
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parent.parent.parent))
    shown, run = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    nbclient.NotebookClient(run, timeout=300, kernel_name="python3").execute()
    (broken,) = (cell for cell in run.cells if "square(v)" in cell.source)
    (error,) = (one for one in broken.outputs if one.output_type == "error")
    (number,) = (i for i, line in enumerate(broken.source.splitlines(), 1) if "square(v)" in line)
    assert error.ename == "BuildError"
    assert f"\nIn[{broken.execution_count}]:{number}:" in "\n".join(error.traceback)
    for before, after in zip(shown.cells, run.cells, strict=True):
        assert before.get("execution_count") == after.get("execution_count")
        assert _kinds(before) == _kinds(after), before.source
        assert _results(before) == _results(after)


def _kinds(cell: Any) -> list[tuple[str, ...]]:
    """Returns what each output is. How lines of text come in pieces is a matter of time."""
    outputs = (one for one in cell.get("outputs", []))
    return [*dict.fromkeys((one.output_type, *sorted(one.get("data", {}))) for one in outputs)]


def _results(cell: Any) -> list[str]:
    outputs = (one for one in cell.get("outputs", []) if one.output_type == "execute_result")
    return [one.data["text/plain"] for one in outputs]
