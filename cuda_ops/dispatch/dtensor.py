"""DTensor rules, registered when ``torch.distributed.tensor`` is in use.

Importing it costs more than all of cuda_ops, so nothing here does; the rules
wait until other code imports it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

_MODULE = "torch.distributed.tensor"
_waiting: dict[str, Callable[..., Any]] = {}


def register(name: str, rule: Callable[..., Any]) -> None:
    """Gives DTensor the sharding rule of ``cuda_ops::<name>``, now or once DTensor is imported."""
    if _MODULE in sys.modules:
        importlib.import_module(_MODULE)  # waits for a thread that is importing it
        _register(name, rule)
        return
    if not _waiting and not any(isinstance(finder, _Arrival) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Arrival())
    _waiting[name] = rule


def _register(name: str, rule: Callable[..., Any]) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(getattr(torch.ops.cuda_ops, name).default)(rule)


class _Arrival(importlib.abc.MetaPathFinder):
    """Steps aside at once, but lets the real import of DTensor end with our registrations."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for name, rule in _waiting.items():
                _register(name, rule)
            _waiting.clear()

        # The one loader object of this one import is changed, not its class.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
