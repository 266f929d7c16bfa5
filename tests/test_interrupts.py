"""Ctrl-C in a build: it ends at once, nothing else is built, and nothing counts as a failure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ScratchOp

from cuda_ops.build import compiling, threads
from cuda_ops.dev import watch
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
def started(
    scratch_op: ScratchOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A file that gets the number of each compiler's process; no compiler ends by itself."""
    compiler, started = tmp_path / "c++", tmp_path / "started"
    compiler.write_text(_SLOW.format(started=started))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    yield started
    for process in running(started):  # of a test that failed
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def compilers(started: Path) -> list[int]:
    return [int(line) for line in started.read_text().split()] if started.exists() else []


def running(started: Path) -> list[int]:
    """Lists the compilers that have not ended; one that nothing waits for has no arguments left."""
    found = []
    for process in compilers(started):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextlib.contextmanager
def command_in(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command as in a terminal of its own; ends it if the test fails."""
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"MAX_JOBS": "4", "PYTHONPATH": str(REPO)},  # two operators at a time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.usefixtures("ctrl_c")
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
    with command_in(tmp_path, *command) as process:
        wait_for(lambda: bool(compilers(started)))
        to(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == (130 if command[-1] in names else 1), said
    wait_for(lambda: not running(started))
    assert len(compilers(started)) <= 2  # the others never began


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("to", [os.kill, os.killpg], ids=["the process", "all of the terminal"])
def test_fuzz_stops_at_once_and_keeps_what_it_has(
    tmp_path: Path, to: Callable[[int, int], None]
) -> None:
    kept, corpus = tmp_path / "result.json", tmp_path / "corpus"
    words = ["-m", "cuda_ops.testing", "fuzz", "silu", "--by-chance", "--minutes", "30"]
    with command_in(tmp_path, *words, "--json", str(kept), "--corpus", str(corpus)) as process:
        wait_for(lambda: bool(running_below(process.pid)))
        time.sleep(5)  # until it calls; if it does not yet, the result has no calls
        to(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 130, said
    assert b"Traceback" not in said and b"FOUND" not in said
    assert json.loads(kept.read_text())["findings"] == []


def running_below(process: int) -> str:
    """Returns the numbers of the processes that the threads of one have started."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return "".join(children.read_text() for children in tasks)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_that_wakes_no_thread_is_noticed() -> None:
    done = threading.Event()

    def interrupt() -> None:
        time.sleep(0.2)  # until the main thread waits; the signal does not wake it
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not done.wait(100):
            done.set()

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            threads.result(pool.submit(interrupt))
        assert not done.is_set()
        done.set()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_a_build_is_handed_over_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, hand_over = threading.Event(), ThreadPoolExecutor.submit

    def submit(self: ThreadPoolExecutor, *words: Any) -> Any:
        hand_over(self, *words)
        assert begun.wait(100)
        raise KeyboardInterrupt

    def build() -> bool:
        begun.set()
        while not threads.stopped():
            time.sleep(0.01)
        return True

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with pytest.raises(KeyboardInterrupt), threads.builders(1) as start:
        start(build)


def test_what_is_not_completed_in_time_is_an_error() -> None:
    done = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(done.wait, 100), pool.submit(int)]
        found = threads.completed(futures, 0.2)
        assert next(found) is futures[1]
        with pytest.raises(TimeoutError):
            next(found)
        done.set()


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
    wait_for(lambda: not running(started))
    pair = registry().pairs()[scratch_op.name]
    assert compiling.last_failure(pair, pair.read()) == ""
    monkeypatch.setenv("CXX", str(quick_compiler))
    assert scratch_op.reload().origin == "built"


def test_a_second_ctrl_c_leaves_no_compiler_that_ignores_being_ended(
    scratch_op: ScratchOp, started: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(compiler.read_text().replace("echo $$", "trap '' INT TERM\necho $$"))
    times = iter(range(100_000))

    def sleep(seconds: float) -> None:
        if next(times) == 0:
            raise KeyboardInterrupt
        time.sleep(seconds)

    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    scratch_op.write("v * 2")
    with pytest.raises(KeyboardInterrupt):
        _build_and_interrupt(started, scratch_op)
    assert next(times) > 1
    assert not running(started)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_compilers_of_a_watch(scratch_op: ScratchOp, started: Path) -> None:
    def interrupt() -> None:
        wait_for(started.exists)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    scratch_op.write("v * 2")
    pair = registry().rescan()[scratch_op.name]
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        watch._after_save(pair, pair.read(), None, "cpu", {})
    other.join()
    assert not running(started)


def test_a_word_of_the_compiler_is_no_ctrl_c(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="interrupted"), threads.running_compilers(tmp_path):
        raise RuntimeError("a.cpp:1:2: error: 'interrupted by user' was not declared")


def test_no_build_begins_after_one_that_ctrl_c_has_ended(tmp_path: Path) -> None:
    begun = []

    def build(number: int) -> None:
        with threads.running_compilers(tmp_path):
            begun.append(number)
            raise RuntimeError("no object") from subprocess.CalledProcessError(130, "ninja")

    with threads.builders(1) as submit:
        futures = [submit(build, number) for number in range(3)]
        assert [type(future.exception()) for future in futures] == [KeyboardInterrupt] * 3
    assert begun == [0]
