"""Time limits of tests that count how busy the machine is, so that only a test that hangs is ended.

Two cores with a load of 8 give a test a quarter of the time that its limit was chosen for.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from types import FrameType
from typing import Any

import pytest
import pytest_timeout
from _pytest.faulthandler import fault_handler_stderr_fd_key

#: How long after its limit a test that Python cannot interrupt ends with its process.
_GRACE = 60.0


def share() -> float:
    """Returns how many runnable processes there were for each core in the last five minutes."""
    return max(1.0, os.getloadavg()[1] / (os.cpu_count() or 1))


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Sets a timer that starts again for what the machine's load took."""
    if settings.method != "signal":
        return None
    start = time.monotonic()

    def expired(signum: int, frame: FrameType | None) -> None:
        remaining = settings.timeout * share() - (time.monotonic() - start)
        if remaining <= 0:
            pytest_timeout.timeout_sigalrm(item, settings)
            return
        signal.setitimer(signal.ITIMER_REAL, remaining)
        # A kernel that hangs would not have let this run, so the test goes on.
        errors = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(remaining + _GRACE, file=errors, exit=True)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # pytest-timeout adds and calls it
    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
