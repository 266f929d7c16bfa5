"""Warns when an operation takes long."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from cuda_ops.build.advice import dev_command

#: Longer than any quick comparison of an operator that works.
_SECONDS = 20.0
#: A shell script that reads a line when an operation begins and an empty one when it ends. If the
#: last line is not empty, this process died during that operation, and the script, which has the
#: name of the dev command, says so.
_WITNESS = """while read -r line; do last=$line; done
[ -z "$last" ] || echo "The process died in $last. \
$0 --check runs that in a process of its own." >&2"""


@contextlib.contextmanager
def announced(what: str, seconds: float = _SECONDS) -> Iterator[None]:
    """Warns on stderr when ``what`` takes longer than ``seconds``, and soon after prints the stack,
    unless faulthandler is already in use.

    The block runs on: a kernel that does not end can only be ended with its process. So Ctrl-C ends
    the process at once, since Python may get no chance to handle it. A crash leaves the stack, and
    a line that names ``what``.
    """
    _tell_witness(what)
    text = (
        f"{what} has taken {seconds:g} s and may never end; Ctrl-C stops it. "
        f"{dev_command()} --check would run it in a process of its own, with a time limit."
    )
    timer = threading.Timer(seconds, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    # There is one timer in a process, and pytest, for example, uses it.
    if mine := not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, ValueError, io.UnsupportedOperation):
            # From a thread that needs no interpreter lock, which a kernel may hold. Later than the
            # warning, whose thread could end while the stacks are walked.
            faulthandler.dump_traceback_later(1.5 * seconds, file=sys.stderr)
            faulthandler.enable(sys.stderr)
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
        timer.cancel()
        _tell_witness("")
        if mine:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()


def _tell_witness(what: str) -> None:
    """Writes a line to the other process; does nothing where it cannot run."""
    with contextlib.suppress(OSError, ValueError):
        pipe = _witness().stdin
        assert pipe is not None
        pipe.write(f"{what}\n")
        pipe.flush()


@functools.cache
def _witness() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["/bin/sh", "-c", _WITNESS, dev_command()],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    # Processes that were forked meanwhile may hold the pipe open.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
