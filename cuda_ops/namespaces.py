"""The operators of a namespace as functions of a Python module: ``my_ops.rms_norm``."""

# The standard library alone at the top: setup.py may come before torch.
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from cuda_ops.names import fault_of_namespace, keyed


class _Listed(str):
    """A name that ``dir`` of the module gave. Code that walks over those, such as ``help`` and
    completion, gets a function even for an operator that cannot be used; code that names the
    operator gets the error.
    """

    __slots__ = ()


def expose(namespace: str, module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes a module show the operators of a namespace; each is loaded at its first use.

    Args:
        namespace: the one that the bindings name, ``CUDA_OPS(my_ops, library)``.
        module: the name of the module, ``__name__``; a package for instance. What it has itself,
            and its submodules, come before operators.

    Returns:
        Its ``__getattr__`` and ``__dir__``.

    Raises:
        ValueError: operators cannot have this namespace.

    Example::

        from cuda_ops.namespaces import expose

        __getattr__, __dir__ = expose("my_ops", __name__)
    """
    if fault := fault_of_namespace(namespace):
        raise ValueError(f"expose: {fault}")

    def get(name: str) -> Any:
        if isinstance(name, _Listed):
            try:
                return get(str(name))
            except Exception as error:  # a plugin's or a guest's code may raise anything
                return _unusable(get, module, str(name), error)
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if _has_submodule(module, name):
            return importlib.import_module(f"{module}.{name}")
        from cuda_ops.registry import registry

        key = keyed(namespace, name)
        value = registry().public(key)
        if registry().loaded(key) is not None:
            # A function for the life of the process, whatever is reloaded: later uses find it at
            # once. A guest's module is a new one after each reload.
            setattr(sys.modules[module], name, value)
            value.__module__ = module  # so that it can be pickled
        return value

    _Finder.exposed[module] = namespace, get
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())

    def names() -> list[str]:
        from cuda_ops.registry import registry

        pairs = (pair.stem for pair in registry().pairs().values() if pair.namespace == namespace)
        return sorted({*vars(sys.modules[module]), *map(_Listed, pairs)})

    return get, names


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets ``import my_ops.rms_norm`` find an operator, as it finds a submodule. Imported is its
    public function.
    """

    exposed: ClassVar[dict[str, tuple[str, Callable[[str], Any]]]] = {}

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        module, _, name = fullname.rpartition(".")
        if module not in self.exposed or name.startswith("_"):
            return None
        from cuda_ops.registry import registry

        if keyed(self.exposed[module][0], name) not in registry().pairs():
            return None
        return importlib.machinery.ModuleSpec(fullname, self)  # without an origin: no file

    def exec_module(self, module: ModuleType) -> None:
        parent, _, name = module.__name__.rpartition(".")
        value = self.exposed[parent][1](name)
        # What stands here when this returns is what the import gives.
        sys.modules[module.__name__] = value


def _has_submodule(module: str, name: str) -> bool:
    if not hasattr(sys.modules[module], "__path__"):
        return False
    found = importlib.util.find_spec(f"{module}.{name}")
    return found is not None and found.origin is not None  # no folder without a module


def hidden_by(namespace: str, name: str) -> str:
    """Returns what comes before an operator in a module that shows those of its namespace, so that
    the operator is not found there; empty where nothing does.

    Example::

        assert hidden_by("cuda_ops", "silu") == ""
    """
    from cuda_ops.registry import registry

    operator = registry().loaded(keyed(namespace, name))
    for module, (shown, _) in _Finder.exposed.items():
        if shown != namespace:
            continue
        if _has_submodule(module, name):
            return f"the module {module}.{name}"
        value = vars(sys.modules[module]).get(name)
        if value is not None and (operator is None or value is not operator.public):
            return f"{module}.{name}, which the module defines itself"
    return ""


def _unusable(
    get: Callable[[str], Any], module: str, name: str, error: Exception
) -> Callable[..., Any]:
    """Stands in for an operator that cannot be used; its docstring and each call say why."""

    def operator(*args: Any, **kwargs: Any) -> Any:
        return get(name)(*args, **kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__module__ = module  # help shows what a module has itself
    operator.__doc__ = f"Cannot be used: {error}"
    return operator
