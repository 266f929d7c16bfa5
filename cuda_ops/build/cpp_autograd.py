"""Builds what records gradients in C++, for one torch and one Python.

An operator's libraries fit every torch, and autograd's graph is no part of the stable ABI. So what
makes the nodes of that graph is a small library of its own, ``dispatch/cpp_autograd.cpp``, compiled
for one torch and one Python: by ``pip install -e .``, or by ``python -m cuda_ops accelerate`` where
a wheel is installed. A call that wants a gradient then costs little more on the host than one of
torch's own. Without it all is the same, and that call slower.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sysconfig
import warnings
from pathlib import Path

import torch

from cuda_ops.build import cache
from cuda_ops.build.discovery import BUILTIN_ROOT, PACKAGE
from cuda_ops.build.shared import compile_shared
from cuda_ops.errors import BuildError

#: ``python``: gradients are recorded in Python. Read at an operator's first use.
SWITCH = "CUDA_OPS_AUTOGRAD"
#: What a warning begins with where gradients are not recorded in C++.
SLOWER = "cuda_ops: gradients are recorded in Python, which takes longer"
_SOURCE = PACKAGE / "dispatch" / "cpp_autograd.cpp"
#: The name of the module, and of its folder in the cache.
NAME = "cpp_autograd"
_LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")


def build(folder: Path | None = None) -> Path:
    """Compiles the library for this torch and this Python, unless it is there.

    Args:
        folder: where to; by default the cache.

    Returns:
        Its path.

    Raises:
        BuildError: there is no compiler or Python's headers are not there, or the compiler refuses.

    Example::

        cpp_autograd.build()
    """
    path = (folder or cache.folder(NAME)) / _file()
    if not path.is_file():
        headers = Path(sysconfig.get_path("include"))
        if not (headers / "Python.h").is_file():
            raise BuildError(
                f"{path.name}: expected Python's headers in {headers}, got none; install the "
                "package of them, python3-dev or python3-devel"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        flags = ["-std=c++17", "-O2", "-Wall", "-fvisibility=hidden", abi, f"-I{headers}"]
        compile_shared(_SOURCE.read_text(encoding="ascii"), path, flags, _LIBRARIES)
    return path


def found() -> Path | None:
    """Returns the library for this torch and this Python; ``None`` where none was built."""
    own = BUILTIN_ROOT / "lib" / _file()
    if own.is_file():
        return own
    try:
        cached = cache.cache_dir() / NAME / _file()
        if cached.is_file():
            cache.check(cached)
            return cached
    except (BuildError, OSError) as error:  # a home folder that may not be entered, for one
        warnings.warn(f"{SLOWER}: {error}", RuntimeWarning, stacklevel=2)
    return None


@functools.cache
def _file() -> str:
    """Returns the name of the library: it fits one torch and one Python, and one text."""
    text = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    version = re.sub(r"[^\w.+]", "_", torch.__version__)
    return f"{NAME}-torch{version}-{sysconfig.get_config_var('SOABI')}-{text}.so"
