"""Records gradients in C++ where that was built for the torch in use; otherwise in Python.

:mod:`cuda_ops.build.cpp_autograd` builds it, from ``cpp_autograd.cpp``.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from cuda_ops.build import cpp_autograd as library
from cuda_ops.derive.gradient import ByName
from cuda_ops.dispatch import first_use, nvtx
from cuda_ops.errors import CudaOpsError
from cuda_ops.spec import OpSpec


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
    said = os.environ.get(library.SWITCH)
    if said not in (None, "", "python"):
        raise CudaOpsError(f"{library.SWITCH}: expected python, or nothing, got {said!r}")
    if said or (path := library.found()) is None:
        return None
    try:
        loader = importlib.machinery.ExtensionFileLoader(library.NAME, str(path))
        spec = importlib.util.spec_from_file_location(library.NAME, path, loader=loader)
        if spec is None:
            raise ImportError(f"{path} is no module")
        made = importlib.util.module_from_spec(spec)
        loader.exec_module(made)
    except ImportError as error:
        warnings.warn(f"{library.SLOWER}: {error}", RuntimeWarning, stacklevel=2)
        return None
    return made
