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
import sys as _sys
import typing as _typing

from cuda_ops.names import FUNCTIONS as _FUNCTIONS
from cuda_ops.namespaces import expose as _expose

if _typing.TYPE_CHECKING:
    from cuda_ops.dev.magic import load_ipython_extension as load_ipython_extension
    from cuda_ops.dev.strings import inline as inline
    from cuda_ops.registry import register_all as register_all

__version__ = "0.2.0"

if _util.find_spec("torch") is not None:  # setup.py may come before torch
    try:
        from cuda_ops import torch_ops as _torch_ops
    except Exception:
        if "-m cuda_ops doctor" not in " ".join(_sys.orig_argv):  # which says what is wrong with it
            raise
    else:
        _torch_ops.install()

_operator, _names = _expose("cuda_ops", __name__)


def __getattr__(name: str) -> _typing.Any:
    if name in _FUNCTIONS:
        return getattr(_importlib.import_module(_FUNCTIONS[name]), name)
    return _operator(name)


def __dir__() -> list[str]:
    return sorted({*_names(), *_FUNCTIONS})
