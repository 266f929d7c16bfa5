"""Calls back once a module of torch is in use that cuda_ops must not import by itself.

Importing ``torch.distributed.tensor`` costs more than all of cuda_ops.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

#: What to call, by module and by a key that keeps the latest of several.
_waiting: dict[str, dict[str, Callable[[], None]]] = {}


def when_imported(module: str, key: str, action: Callable[[], None]) -> None:
    """Calls ``action`` now, or at the end of the module's import; instead of an earlier one with
    the same key.
    """
    if module in sys.modules:
        importlib.import_module(module)  # waits for a thread that is importing it
        action()
        return
    if not any(isinstance(f, _Arrival) and f.module == module for f in sys.meta_path):
        sys.meta_path.insert(0, _Arrival(module))
    _waiting.setdefault(module, {})[key] = action


class _Arrival(importlib.abc.MetaPathFinder):
    """Steps aside at once, but lets the real import of its module end with the calls."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in _waiting.pop(fullname, {}).values():
                action()

        # The one loader object of this one import is changed, not its class.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
