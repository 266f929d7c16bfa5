"""Runs a program that can be ended at any time, with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Seconds between two looks at a program and at whether to end.
_LOOK = 0.05


class StoppedError(Exception):
    """The run ends before this program did."""


def run(
    command: Sequence[str | Path],
    folder: Path,
    said: Path,
    stop: threading.Event,
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """Runs a program in a folder; ``None`` if it took longer than ``timeout`` seconds.

    Args:
        command: the program and its arguments.
        folder: where it runs.
        said: the file for its output and errors.
        stop: ends it when set.
        timeout: how long it may take.
        environment: its variables, if not those of this process.

    Raises:
        StoppedError: ``stop`` was set.
    """
    if stop.is_set():
        raise StoppedError
    with said.open("wb") as output:
        # A session of its own: Ctrl-C in the terminal reaches this process alone.
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + timeout
    try:
        while process.poll() is None:
            if stop.is_set():
                raise StoppedError
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK)
        return process.returncode
    finally:
        # What it has started may outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
