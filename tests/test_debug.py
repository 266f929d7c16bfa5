"""Debug builds lie beside the ordinary libraries and serve the processes that ask for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ScratchOp, needs_nvcc
from fake_builds import compiled
from reports import rendered, report, result

from benchmarks import tables
from cuda_ops.benchmarking import plots
from cuda_ops.benchmarking.environment import DEBUG_BUILD, environment
from cuda_ops.benchmarking.regression import regressions
from cuda_ops.benchmarking.results import Report
from cuda_ops.build import cache, commands, compiling, debug, logs, provenance, toolchain
from cuda_ops.build.cache import Name
from cuda_ops.build.discovery import Pair
from cuda_ops.compile_ops import compile_ops, reload
from cuda_ops.dev import main
from cuda_ops.dev.scaffold import new_pair
from cuda_ops.errors import BenchmarkError, BuildError
from cuda_ops.registry import registry

REPO = Path(__file__).resolve().parent.parent
X = torch.tensor([1.0, 2.0, 3.0])
HERE = ("9.0a",)


# --- files ---------------------------------------------------------------------------------


@pytest.fixture
def pair(scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """A pair with a kernel, on a machine with a toolkit; its builds publish nothing of use."""
    monkeypatch.setattr(compiling, "_compile", compiled)
    monkeypatch.setattr(toolchain, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "cuda_version", lambda: "13.0")
    scratch_op.write("v")
    (scratch_op.root / "kernels" / f"{scratch_op.name}.cu").touch()
    return registry().rescan()[scratch_op.name]


def test_both_libraries_lie_beside_each_other(pair: Pair) -> None:
    ordinary = compiling.build(pair, HERE)
    debugged = compiling.build(pair, HERE, debug=True)
    assert (ordinary.origin, debugged.origin) == ("built", "built")
    assert (ordinary.debug, debugged.debug) == (False, True)
    assert ordinary.path.parent == debugged.path.parent
    assert debugged.path.name.endswith("-debug.so") and ordinary.path.exists()
    for built in (ordinary, debugged):
        again = compiling.build(pair, HERE, debug=built.debug)
        assert (again.origin, again.path) == ("cached", built.path)
        assert cache.is_debug(built.path) == built.debug
    names = [Name.of(pair, HERE, pair.read().hash, debug=which) for which in (False, True)]
    assert names[0].key != names[1].key and names[0].folder != names[1].folder
    assert Name.parse(debugged.path.name) == names[1] and names[1].lock != names[0].lock


def test_one_is_never_found_in_place_of_the_other(pair: Pair) -> None:
    text = pair.read()
    debugged = compiling.build(pair, HERE, debug=True)
    assert compiling.find_library(pair, text) is None
    ordinary = compiling.build(pair, HERE)
    os.utime(debugged.path, (time.time() + 3600,) * 2)
    assert compiling.find_library(pair, text) == ordinary.path
    assert compiling.find_library(pair, text, debug=True) == debugged.path
    debugged.path.unlink()
    assert compiling.find_library(pair, text, debug=True) is None


def test_a_name_alone_makes_no_ordinary_library_a_debug_build(pair: Pair) -> None:
    ordinary = compiling.build(pair, HERE)
    debugged = compiling.build(pair, HERE, debug=True)
    contents = debugged.path.read_bytes()
    debugged.path.write_bytes(ordinary.path.read_bytes())
    ordinary.path.write_bytes(contents)
    assert compiling.find_library(pair, pair.read()) is None
    assert compiling.find_library(pair, pair.read(), debug=True) is None


def test_what_pip_built_is_no_debug_build(pair: Pair) -> None:
    pair.prebuilt.parent.mkdir(exist_ok=True)
    pair.prebuilt.write_bytes(compiling.build(pair, HERE).path.read_bytes())
    assert provenance.read(pair.prebuilt) == provenance.of(pair, HERE)
    assert compiling.build(pair, HERE, debug=True).origin == "built"
    compiling.library_path(pair, HERE, debug=True).unlink()
    assert compiling.find_library(pair, pair.read(), debug=True) is None
    pair.prebuilt.unlink()


def test_a_debug_build_that_fails_is_no_failure_of_the_ordinary_one(pair: Pair) -> None:
    name = Name.of(pair, HERE, pair.read().hash, debug=True)
    cache.folder("lib")
    name.library.with_suffix(".failed.txt").write_text("nvcc gave up")
    assert compiling.last_failure(pair, pair.read()) == ""


def test_speed_that_a_debug_build_lost_is_no_warning() -> None:
    lost, other = "ptxas info : (C7505) Potential Performance Loss: x", "nvcc warning : y"
    log = f"{lost}\n{other}\nptxas info : Used 8 registers\n"
    assert logs.warnings(log) == (lost, other)
    assert logs.warnings(log, debug=True) == (other,)


def test_the_line_of_a_library_says_debug(pair: Pair) -> None:
    made_from = provenance.read(compiling.build(pair, HERE, debug=True).path)
    assert made_from == provenance.of(pair, HERE, debug=True) and made_from.debug
    assert made_from.environment == provenance.of(pair, HERE).environment


# --- flags ---------------------------------------------------------------------------------


def test_flags_win_over_those_of_the_environment(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "-O3 -g0")
    flags = commands.cxx_flags(pair, HERE, debug=True)
    assert flags[-2:] == ["-g", "-O0"] and flags.index("-O3") < flags.index("-O0")
    assert not {"-G", "-g"} & {*commands.nvcc_flags(pair, HERE)}
    assert "-g" not in commands.cxx_flags(pair, HERE)


@pytest.mark.slow
@needs_nvcc
def test_flags_reach_both_compilers_and_a_new_process_takes_the_ordinary_library(
    scratch_op: ScratchOp, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX")  # which does not optimize anyway
    new_pair(scratch_op.name, scratch_op.root)
    command = ["--root", str(scratch_op.root), "--verbose", "--json", scratch_op.name]
    assert main(["--debug", *command]) == 0
    said = capfd.readouterr()
    (row,) = json.loads(said.out)
    assert row["debug"] and row["built"] == "built"
    lines = said.err.splitlines()
    (binding,) = (line.split() for line in lines if line.endswith(f"-o {scratch_op.name}.o "))
    (kernel,) = (line.split() for line in lines if line.endswith(f"-o {scratch_op.name}.cuda.o "))
    assert {"-g", "-O0"} <= {*binding} and binding.index("-O0") > binding.index("-O2")
    assert {"-G", "-g"} <= {*kernel} and "-O0,-fvisibility=hidden,-fno-gnu-unique" in kernel
    assert any(f"{scratch_op.name}  " in line and "s (debug)" in line for line in lines)
    assert f"CUDA_OPS_DEBUG={scratch_op.name} python" in said.err
    assert "warning" not in said.err  # -lineinfo beside -G would be one

    # The library that was loaded here is the debug build; another process does not take it.
    debugged = registry().library_of(scratch_op.name)
    assert debugged is not None and b"\0.debug_info\0" in debugged.read_bytes()
    assert "is not built" in _loaded(scratch_op)[1]
    assert main(command) == 0
    capfd.readouterr()
    ordinary = registry().library_of(scratch_op.name)
    assert ordinary is not None and b"\0.debug_info\0" not in ordinary.read_bytes()
    assert _loaded(scratch_op)[0] == str(ordinary)
    assert _loaded(scratch_op, CUDA_OPS_DEBUG=scratch_op.name)[0] == str(debugged)
    assert _loaded(scratch_op, CUDA_OPS_DEBUG=f"cuda_ops::{scratch_op.name}")[0] == str(debugged)


@pytest.mark.slow
def test_gdb_stops_in_a_binding(scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch) -> None:
    gdb = shutil.which("gdb")
    if gdb is None:
        pytest.skip("no gdb here")  # no package of pip brings one
    monkeypatch.delenv("CXX")
    scratch_op.write("v * 2")
    (row,) = compile_ops([scratch_op.name], debug=True)
    assert not row.error
    text = scratch_op.binding.read_text().splitlines()
    line = next(i for i, part in enumerate(text, 1) if "return v * 2" in part)
    call = f"{_LOADED}\nimport torch\nregistry().public(sys.argv[2])(torch.ones(1))"
    commands = ("set breakpoint pending on", f"break {scratch_op.binding.name}:{line}")
    options = [
        word for command in (*commands, "run", "continue", "print v") for word in ("-ex", command)
    ]
    done = subprocess.run(
        [
            gdb, "-nx", "-batch", *options,
            "--args", sys.executable, "-c", call, str(scratch_op.root), scratch_op.name,
        ],
        env={**os.environ, "PYTHONPATH": str(REPO), debug.VARIABLE: scratch_op.name},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "ptrace" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("gdb may not watch a process here")  # containers may forbid ptrace
    assert f"{scratch_op.binding.name}:{line}" in done.stdout, done.stdout + done.stderr
    assert "$1 = 1" in done.stdout, done.stdout + done.stderr


_LOADED = """
import sys
from pathlib import Path
from cuda_ops.registry import registry
registry().add_root(Path(sys.argv[1]))
registry().public(sys.argv[2])
print(registry().library_of(sys.argv[2]))
"""


def _loaded(op: ScratchOp, **variables: str) -> tuple[str, str]:
    """Returns the library that the first use in a new process loads, and what it says."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, str(op.root), op.name],
        env={**os.environ, "PYTHONPATH": str(REPO), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


# --- asking --------------------------------------------------------------------------------


def test_what_is_asked_for_and_not_built_is_said(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("v * 2")
    scratch_op.build()
    monkeypatch.setenv(debug.VARIABLE, scratch_op.name)
    message = (
        "CUDA_OPS_DEBUG asks for its debug build, and there is none of the present sources: run "
        f"python compile_dev.py --root .* --debug {scratch_op.name}$"
    )
    with pytest.raises(BuildError, match=message):
        registry().public(scratch_op.name)


@pytest.mark.parametrize("said", ["nothing_of_the_kind", "1"])
def test_a_name_that_no_operator_has_is_refused(
    scratch_op: ScratchOp, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("v")
    scratch_op.build()
    monkeypatch.setenv(debug.VARIABLE, f"{scratch_op.name}, {said}")
    message = f"CUDA_OPS_DEBUG: expected names of operators, separated by commas, got '{said}'"
    with pytest.raises(BuildError, match=message):
        registry().public(scratch_op.name)
    with pytest.raises(BuildError, match=message):
        compile_ops([scratch_op.name])


def test_names_are_separated_by_commas_and_spaces_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = registry().pairs()
    monkeypatch.setenv(debug.VARIABLE, " silu, cuda_ops::matmul ,")
    assert debug.asked(pairs) == {"silu", "matmul"}
    assert debug.variable_for(["silu", "matmul"]) == "CUDA_OPS_DEBUG=silu,matmul"
    monkeypatch.setenv(debug.VARIABLE, "")
    assert debug.asked(pairs) == set()


def test_the_variable_builds_too_and_a_reload_keeps_a_debug_build(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("v * 2")
    monkeypatch.setenv(debug.VARIABLE, scratch_op.name)
    (row,) = compile_ops([scratch_op.name])
    assert row.debug and not row.error
    monkeypatch.delenv(debug.VARIABLE)
    scratch_op.write("v * 3")
    (row,) = reload(scratch_op.name)
    assert row.debug and torch.equal(scratch_op.function(X), X * 3)
    (row,) = compile_ops([scratch_op.name])
    assert not row.debug and torch.equal(scratch_op.function(X), X * 3)
    (row,) = reload(scratch_op.name)
    assert not row.debug


@pytest.mark.parametrize("asked", ["--debug", debug.VARIABLE])
def test_what_is_watched_is_no_debug_build(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if asked == debug.VARIABLE:
        monkeypatch.setenv(asked, "silu")
    assert main(["--watch", *["--debug"] * (asked == "--debug"), "silu"]) == 1
    assert f"--watch: expected ordinary builds, which it times at every save, got {asked}; run" in (
        capsys.readouterr().out
    )


# --- benchmarks ----------------------------------------------------------------------------


def test_a_measurement_says_what_ran_as_a_debug_build(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    compile_ops([scratch_op.name], debug=True)
    assert scratch_op.name in environment(torch.device("cpu"))[DEBUG_BUILD].split(", ")
    compile_ops([scratch_op.name])
    assert scratch_op.name not in environment(torch.device("cpu")).get(DEBUG_BUILD, "")


def debugged(made: Report) -> Report:
    return replace(made, environment={**made.environment, DEBUG_BUILD: "f"})


def test_a_report_of_a_debug_build_says_so(tmp_path: Path) -> None:
    assert "debug build of f: it is not optimized" in rendered(debugged(report(result())))
    assert "debug build" not in rendered(report(result()))
    pytest.importorskip("matplotlib")
    pictures = plots.draw(debugged(report(result())), tmp_path)
    assert all("NVIDIA H200, debug build of f" in picture.read_text() for picture in pictures)


def test_a_run_of_a_debug_build_is_neither_kept_nor_compared(tmp_path: Path) -> None:
    ordinary, slow = report(result()), debugged(report(result()))
    slow.save(tmp_path / "run.json")
    with pytest.raises(BenchmarkError, match=r"run\.json is of a debug build of f; measure"):
        tables.keep(tmp_path / "run.json", tmp_path)
    with pytest.raises(BenchmarkError, match="the base is of a debug build of f"):
        regressions(slow, ordinary)
    with pytest.raises(BenchmarkError, match="this run is of a debug build of f"):
        regressions(ordinary, slow)
