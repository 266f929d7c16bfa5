"""How messages call the command that builds and checks operators."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from cuda_ops.build.discovery import PACKAGE

#: The script of a checkout.
_SCRIPT = "compile_dev.py"


def dev_command() -> str:
    """Returns the command as this process was called, or one that works in the current folder:
    ``python compile_dev.py`` in a checkout, else ``python -m cuda_ops dev``.
    """
    called = Path(sys.argv[0] if sys.argv else "")  # a C++ program may have none
    if called.name == "cuda-ops":
        return "cuda-ops"
    if called.name == _SCRIPT:
        return f"python {shlex.quote(str(called))}"
    is_module = PACKAGE in called.resolve().parents
    return f"python {_SCRIPT}" if not is_module and _in_checkout() else "python -m cuda_ops dev"


def _in_checkout() -> bool:
    try:
        return Path(_SCRIPT).samefile(PACKAGE.parent / _SCRIPT)
    except OSError:  # there is none here, or there
        return False
