"""Runs other programs, and gives up on one that stays silent for too long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: How long a program may be silent: importing torch from a cold disk takes most of it.
SECONDS = 120.0
#: How long to wait for a process that was killed: one that hangs in a driver may not go.
_GRACE_SECONDS = 2.0
_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class Answer:
    """What a program said, and how it ended."""

    text: str
    #: Why there is none, or only a part; empty where the program ended well.
    problem: str
    #: Whether the program was silent for too long.
    hangs: bool = False


def ask(command: Sequence[str], seconds: float) -> Answer:
    """Runs a program and returns what it prints; see :attr:`Answer.problem` where it fails."""
    with tempfile.TemporaryDirectory(prefix="cuda_ops_doctor_") as folder:
        said = Path(folder) / "said"
        problem, hangs = _run(command, said, said, seconds, os.environ)
        return Answer(_text(said), problem, hangs)


def ask_child(probe: str, request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Answer]:
    """Runs a probe of :mod:`cuda_ops.doctor.child` in a process of its own.

    Returns:
        What it told, as far as it came, and how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="cuda_ops_doctor_") as folder:
        told, said = Path(folder) / "told", Path(folder) / "said"
        told.touch()
        command = [sys.executable, "-m", "cuda_ops.doctor.child", str(told), probe]
        # It imports what this process would.
        path = os.pathsep.join(entry or "." for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path}
        problem, hangs = _run(
            [*command, json.dumps(request)], told, said, SECONDS, environment
        )  # fmt: skip
        lines = []
        for line in _text(told).splitlines():
            with contextlib.suppress(ValueError):  # its last one, cut short
                lines.append(json.loads(line))
        return lines, Answer(_text(said), problem, hangs)


def _run(
    command: Sequence[str],
    watched: Path,
    said: Path,
    seconds: float,
    environment: Mapping[str, str],
) -> tuple[str, bool]:
    """Waits until a program ends, or ``watched`` has not grown for so many seconds.

    Its output goes to a file: a pipe would stay open in what it started.
    """
    with said.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"{command[0]} does not start: {error.strerror}", False
    size, since = -1, time.monotonic()
    try:
        while process.poll() is None:
            if (now := watched.stat().st_size) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > seconds:
                return f"gave no answer within {seconds:g} s", True
            time.sleep(_BETWEEN_LOOKS)
    finally:
        _end(process)
    return _ending(process.returncode, _text(said)), False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs, with all that it started."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)


def _ending(status: int, said: str) -> str:
    if status == 0:
        return ""
    last = (said.strip().splitlines() or ["nothing"])[-1]
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return f"ended with status {status} and said: {last}"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
