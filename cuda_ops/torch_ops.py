"""``torch.ops.cuda_ops``, and the namespaces of other roots and of guests: an operator is loaded
when it is first asked for, as by ``cuda_ops``, so that a graph exported elsewhere finds it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.names import HOME, INTERNAL, OF_TORCH

if TYPE_CHECKING:
    from cuda_ops.build.discovery import Pair


class _Namespace(torch._ops._OpNamespace):
    __module__ = torch._ops._OpNamespace.__module__  # the names of its operators begin with it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or not _define(self.name, name):
                raise
            return super().__getattr__(name)


class _Ops(torch._ops._Ops):
    __module__ = torch._ops._Ops.__module__

    def __getattr__(self, name: str) -> Any:
        namespace = super().__getattr__(name)
        _take_over(namespace)
        return namespace


def install() -> None:
    """Lets ``torch.ops`` ask for what torch does not know, in namespaces that were used before too.

    The objects stay the same, since others hold them.
    """
    if not isinstance(torch.ops, _Ops):
        torch.ops.__class__ = _Ops
    for namespace in tuple(vars(torch.ops).values()):
        _take_over(namespace)


def _take_over(namespace: Any) -> None:
    if type(namespace) is not torch._ops._OpNamespace or namespace.name == INTERNAL:
        return
    if namespace.name not in OF_TORCH:
        namespace.__class__ = _Namespace


def _define(namespace: str, name: str) -> bool:
    """Loads what defines an operator that torch does not know; returns whether anything may.

    torch itself asks whether there is one while any library defines its operators. Plugins are not
    imported for a name that no file has, and nothing is loaded from within a load.
    """
    known = sys.modules.get("cuda_ops.registry")
    if not hasattr(known, "is_made"):  # not imported yet, or in the middle of it
        known = None
    if known is not None and (known.is_loading() or (known.is_importing() and namespace != HOME)):
        return False
    if namespace != HOME and (known is None or not known.is_made()):
        if not any(pair.defines(namespace, name) or pair.registers(namespace, name)
                   for pair in _pairs_at_hand()):  # fmt: skip
            return False
    from cuda_ops.registry import registry

    return registry().define(namespace, name)


@functools.cache
def _pairs_at_hand() -> tuple[Pair, ...]:
    """Returns the pairs of cuda_ops and those inside of the packages that have plugins, which this
    does not import.
    """
    from cuda_ops.build.discovery import BUILTIN_ROOT, root_problem, survey

    roots = [root for root in _installed_roots() if not root_problem(root)]
    return tuple(survey([BUILTIN_ROOT], roots)[0].values())


def _installed_roots() -> list[Path]:
    packages = {
        entry_point.value.partition(":")[0].partition(".")[0]
        for entry_point in importlib.metadata.entry_points(group=HOME)
    }
    roots: dict[Path, None] = {}
    for package in sorted(packages):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # of an install that is broken
            continue
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for depth in ("", "*/", "*/*/"):
                for part in ("bindings", "kernels"):
                    roots |= {path.parent: None for path in Path(folder).glob(depth + part)}
    return sorted(roots)
