"""A word where there would be silence: what takes long, while it does."""

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

#: Longer than any quick comparison of an operator that works.
_SECONDS = 20.0


#: Reads what is going on, line by line, and says the last one if it was not an empty line: then
#: this process has died in it, of whatever.
_WITNESS = """while read -r line; do last=$line; done
[ -z "$last" ] || echo "The process died in $last. \
compile_dev.py --check runs that in a process of its own." >&2"""


@contextlib.contextmanager
def announced(what: str, seconds: float = _SECONDS) -> Iterator[None]:
    """Say on stderr that ``what`` takes longer than ``seconds``, and soon after where it is, unless
    somebody else uses faulthandler.

    It goes on all the same: a kernel that does not end can only be ended with its process, which
    Ctrl-C does meanwhile, as a kernel gives Python no time to. A crash leaves the stack, and a line
    that says in what.
    """
    _witness(what)
    text = (
        f"{what} has taken {seconds:g} s and may never end; Ctrl-C stops it. "
        "compile_dev.py --check would run it in a process of its own, with a time limit."
    )
    timer = threading.Timer(seconds, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    # pytest, for one, has its one timer too.
    if mine := not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, ValueError, io.UnsupportedOperation):
            # From a thread that needs no interpreter: a kernel may keep that from everybody. Later
            # than the word, whose thread could end while the stacks are walked.
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
        _witness("")
        if mine:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()


def _witness(what: str) -> None:
    """Tell the other process; where there cannot be one, nobody."""
    with contextlib.suppress(OSError, ValueError):
        pipe = _witnessing().stdin
        assert pipe is not None
        pipe.write(f"{what}\n")
        pipe.flush()


@functools.cache
def _witnessing() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["/bin/sh", "-c", _WITNESS], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    # Processes that were forked meanwhile may hold the pipe open.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
