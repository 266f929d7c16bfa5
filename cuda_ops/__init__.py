"""Turns two files into a PyTorch operator.

``cuda_ops.<op>`` is the public function of each operator, ``torch.ops.cuda_ops.<op>``
the one that the dispatcher calls. Importing this package opens no operator library;
the first use of an operator does.

>>> import torch, cuda_ops
>>> cuda_ops.silu(torch.zeros(3))
tensor([0., 0., 0.])
"""

# Names with an underscore alone: any other would hide the operator of that name. So no
# `from __future__ import annotations` either.
import importlib as _importlib
import importlib.util as _util
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.1.0"

if _util.find_spec("torch") is not None:  # setup.py may come before torch
    from cuda_ops import torch_ops as _torch_ops

    _torch_ops.install()


class _Listed(str):
    """A name that ``dir(cuda_ops)`` gave. Code that walks over those, such as ``help`` and
    completion, gets a function even for an operator that cannot be used; code that names the
    operator gets the error.
    """

    __slots__ = ()


def __getattr__(name: str) -> _Any:
    if isinstance(name, _Listed):
        try:
            return __getattr__(str(name))
        except Exception as error:  # a plugin's or a guest's code may raise anything
            return _unusable(str(name), error)
    if name.startswith("_"):
        raise AttributeError(f"module 'cuda_ops' has no attribute {name!r}")
    here = _Path(__file__).parent
    if (here / f"{name}.py").exists() or (here / name / "__init__.py").exists():
        return _importlib.import_module(f"cuda_ops.{name}")
    from cuda_ops.registry import registry

    value = registry().public(name)
    if registry().loaded(name) is not None:
        # A function for the life of the process, whatever is reloaded: later uses find it at
        # once. A guest's module is a new one after each reload.
        globals()[name] = value
    return value


def _unusable(name: str, error: Exception) -> _Any:
    """Stands in for an operator that cannot be used; its docstring and each call say why."""

    def operator(*args: _Any, **kwargs: _Any) -> _Any:
        return __getattr__(name)(*args, **kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = f"Cannot be used: {error}"
    return operator


def __dir__() -> list[str]:
    from cuda_ops.registry import registry

    return sorted({*globals(), *map(_Listed, registry().pairs())})
