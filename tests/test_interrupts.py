"""Ctrl-C in a build: it ends at once, nothing else is built, and nothing counts as a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ScratchOp

from cuda_ops.build import compiling, threads
from cuda_ops.registry import registry

REPO = Path(__file__).resolve().parent.parent
#: Stands in for a compiler that takes its time.
_SLOW = """#!/bin/sh
case "$*" in -v | --version) echo slow 1.0; exit;; esac
echo $$ >> {started}
exec sleep 300
"""
_SETUP = """
from setuptools import setup
from cuda_ops.packaging import operators
setup(name="endless", **operators("endless", "."))
"""


@pytest.fixture
def started(scratch_op: ScratchOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets the number of each compiler's process; no compiler ends by itself."""
    compiler, started = tmp_path / "c++", tmp_path / "started"
    compiler.write_text(_SLOW.format(started=started))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return started


def compilers(started: Path) -> list[int]:
    return [int(line) for line in started.read_text().split()] if started.exists() else []


def none_runs(started: Path) -> bool:
    """Says whether every compiler has ended; one that nothing waits for has no arguments left."""
    files = [Path(f"/proc/{process}/cmdline") for process in compilers(started)]
    return not any(file.exists() and file.read_bytes() for file in files)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("to", [os.kill, os.killpg], ids=["the process", "all of the terminal"])
@pytest.mark.parametrize(
    "command",
    [["compile_dev.py", "--root", "."], ["setup.py", "build_ext", "--inplace"]],
    ids=["compile_dev", "pip"],
)
def test_a_build_of_several_operators_stops_at_once(
    started: Path, tmp_path: Path, command: list[str], to: Callable[[int, int], None]
) -> None:
    (tmp_path / "bindings").mkdir()
    names = [f"endless_{number}" for number in range(4)]
    for name in names:
        (tmp_path / "bindings" / f"{name}.cpp").write_text("CUDA_OPS(library) {}")
    if command[0] == "setup.py":
        pytest.importorskip("setuptools", reason="setuptools is not installed")
        (tmp_path / "setup.py").write_text(_SETUP)
    else:
        command = [str(REPO / command[0]), *command[1:], *names]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=tmp_path,
        env=os.environ | {"MAX_JOBS": "4", "PYTHONPATH": str(REPO)},  # two operators at a time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    wait_for(lambda: len(compilers(started)) == 2)
    start = time.monotonic()
    to(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert time.monotonic() - start < 5
    assert process.returncode == (130 if command[-1] in names else 1), said
    wait_for(lambda: none_runs(started))
    assert len(compilers(started)) == 2  # the others never began


def _build_and_interrupt(started: Path, op: ScratchOp) -> None:
    with threads.builders(1) as submit:
        submit(compiling.build, registry().rescan()[op.name])
        wait_for(started.exists)
        raise KeyboardInterrupt


def test_an_interrupted_build_is_no_failure_and_the_next_one_succeeds(
    scratch_op: ScratchOp, started: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: Path
) -> None:
    scratch_op.write("v * 2")
    with pytest.raises(KeyboardInterrupt):
        _build_and_interrupt(started, scratch_op)
    wait_for(lambda: none_runs(started))
    pair = registry().pairs()[scratch_op.name]
    assert compiling.last_failure(pair, pair.read()) == ""
    monkeypatch.setenv("CXX", str(quick_compiler))
    assert scratch_op.reload().origin == "built"
