"""Calls back once a module of torch is in use that cuda_ops must not import by itself.

Importing ``torch.distributed.tensor`` costs more than all of cuda_ops.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import warnings
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


def forget(key: str) -> None:
    """Drops the calls with this key that have not been made."""
    for actions in _waiting.values():
        actions.pop(key, None)


class _Arrival(importlib.abc.MetaPathFinder):
    """Lets the real import of its module end with the calls."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)  # by the finders after this one
        finally:
            self._searching.now = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            for key, action in _waiting.pop(fullname, {}).items():
                try:
                    action()
                except Exception as error:  # not the fault of the program that imports
                    warnings.warn(
                        f"cuda_ops: {key} is not registered with {fullname}: {error}", stacklevel=2
                    )

        # The one loader object of this one import is changed, not its class.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
