"""Records gradients in C++ where that was built for the torch in use; otherwise in Python.

An operator's libraries fit every torch, and autograd's graph is no part of the stable ABI. So what
makes the nodes of that graph is a small library of its own, ``cpp_autograd.cpp``, compiled for one
torch and one Python: by ``pip install -e .``, or by ``python -m cuda_ops accelerate`` where a wheel
is installed. A call that wants a gradient then costs little more on the host than one of torch's
own. Without it all is the same, and that call slower.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cuda_ops.build import cache
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.build.shared import compile_shared
from cuda_ops.derive.gradient import ByName
from cuda_ops.dispatch import first_use, nvtx
from cuda_ops.errors import BuildError
from cuda_ops.spec import OpSpec

#: ``python``: gradients are recorded in Python. Read at an operator's first use.
SWITCH = "CUDA_OPS_AUTOGRAD"
_SOURCE = Path(__file__).with_suffix(".cpp")
_NAME = "cpp_autograd"
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
    path = (folder or cache.folder(_NAME)) / _file()
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
        cached = cache.cache_dir() / _NAME / _file()
        if cached.is_file():
            cache.check(cached)
            return cached
    except (BuildError, OSError) as error:  # a home folder that may not be entered, for one
        warnings.warn(f"{_slower()}: {error}", RuntimeWarning, stacklevel=2)
    return None


def apply_of(
    op: OpSpec,
    gradient: Callable[..., Any],
    keys: tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet],
    otherwise: Callable[..., Any],
) -> Callable[..., Any]:
    """Returns a function that calls an operator and records its gradient, in C++ if possible.

    Args:
        op: the operator.
        gradient: ``backward`` of its formula.
        keys: those of its kernels on a CPU and on a GPU.
        otherwise: what does the same in Python. It also gets the calls that C++ does not take.
    """
    formula = getattr(gradient, "__self__", None)
    if not isinstance(formula, ByName) or not formula.is_plain:
        return otherwise
    # Both are Python around the calls of the gradient's operator too, which C++ would pass by.
    if nvtx.is_wanted() or first_use.is_wanted() or (made := _module()) is None:
        return otherwise
    # As numbers: a class of pybind11 is known only to what was built by the same compiler.
    raw = [key.raw_repr() for key in keys]
    function: Callable[..., Any] = made.make(
        op.qualname, formula.sibling.qualname, formula.sibling.name, *raw,
        formula.sources, formula.targets, formula.differentiable, op.tensor_positions,
        formula.without_gradient, otherwise, list(formula.sibling.argument_names),
    )  # fmt: skip
    return function


@functools.cache
def _module() -> ModuleType | None:
    if os.environ.get(SWITCH) == "python" or (path := found()) is None:
        return None
    try:
        loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
        spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
        if spec is None:
            raise ImportError(f"{path} is no module")
        made = importlib.util.module_from_spec(spec)
        loader.exec_module(made)
    except ImportError as error:
        warnings.warn(f"{_slower()}: {error}", RuntimeWarning, stacklevel=2)
        return None
    return made


def _slower() -> str:
    return "cuda_ops: gradients are recorded in Python, which takes longer"


@functools.cache
def _file() -> str:
    """Returns the name of the library: it fits one torch and one Python, and one text."""
    text = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    version = re.sub(r"[^\w.+]", "_", torch.__version__)
    return f"{_NAME}-torch{version}-{sysconfig.get_config_var('SOABI')}-{text}.so"
