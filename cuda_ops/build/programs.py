"""Where programs are found that pip may have installed beside this Python."""

from __future__ import annotations

import os
import sysconfig


def environment() -> dict[str, str]:
    """Returns the environment in which programs are found: a Python that was started by its path
    does not have its own in ``PATH``.
    """
    programs = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    return {**os.environ, "PATH": os.pathsep.join(programs)}
