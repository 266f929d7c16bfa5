"""Pairs written as the PyTorch tutorials write them, unchanged.

They register themselves when opened, so they are loaded as they are and lack
what the manifest gives: see :func:`missing`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cuda_ops.build.discovery import Pair
from cuda_ops.build.source_text import Kind
from cuda_ops.errors import ManifestError

#: The library of each guest that was loaded first.
_opened: dict[str, Path] = {}
_generations = itertools.count(2)


class GuestModule(ModuleType):
    """``cuda_ops.<op>`` of a pybind11 guest: the functions of the library loaded last."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(f"{pair.namespace}.{pair.stem}")
        self.__dict__["_current"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_current"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_current"])


_modules: dict[str, GuestModule] = {}


def load(pair: Pair, path: Path) -> ModuleType:
    """Opens a guest's library.

    Returns:
        A module: the pybind11 functions, or for TORCH_LIBRARY an empty one whose
        docstring says that the operators are in the namespace the guest chose.

    Raises:
        ManifestError: the library does not load, or would register its operators twice.
    """
    module = _modules.setdefault(pair.key, GuestModule(pair))
    first = pair.key not in _opened
    if _opened.setdefault(pair.key, path) != path and pair.registers_when_opened:
        raise ManifestError(
            f"{pair.stem}: TORCH_LIBRARY registers when opened and cannot be replaced in a "
            "live process; restart to use the new build, or write CUDA_OPS(library)"
        )
    if pair.kind is Kind.TORCH_LIBRARY:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise ManifestError(f"{pair.stem}: {path.name} does not load: {error}") from error
        module.__doc__ = f"{pair.stem} registered its operators in torch.ops itself."
        return module
    # pybind11 returns the module that it made before for a name, and Python looks for PyInit_ with
    # what is behind the last dot: what is before it makes the name a new one.
    words = [pair.namespace, *([pair.stem] if pair.module != pair.stem else [])]
    if not first:
        words.append(f"generation_{next(_generations)}")
    name = ".".join((*words, pair.module))
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        current = importlib.util.module_from_spec(spec)
        loader.exec_module(current)
    except ImportError as error:
        if "already registered" in str(error):
            raise ManifestError(
                f"{pair.stem}: {str(error).strip()}: a py::class_ is one for the whole process; "
                "write py::class_<T>(m, name, py::module_local()), or restart to use the new build"
            ) from error
        raise ManifestError(f"{pair.stem}: {path.name} does not load: {error}") from error
    module.__dict__["_current"] = current
    module.__doc__ = current.__doc__
    return module


def missing(pair: Pair) -> str:
    """Says what a guest goes without, in a few words for the table: less where a plugin describes
    it, whose operators have what is said of them there.
    """
    lost = []
    if not pair.is_declared:
        has_fake, has_autograd = own_rules(pair)
        lost = [*([] if has_fake else ["fake"]), *([] if has_autograd else ["autograd"]), "checks"]
    lost.append("single build for every torch")
    if pair.registers_when_opened:
        lost.append("reload in place")
    return f"{pair.kind.value} guest: no " + ", no ".join(lost)


def own_rules(pair: Pair) -> tuple[bool, bool]:
    """Says whether a guest's text has a fake of its own, and a gradient."""
    code = pair.code
    has_fake = "Meta" in code or "register_fake" in code
    return has_fake, _DIFFERENTIABLE.search(code) is not None


#: What a source has where it defines a gradient, or leaves it to torch's own operators.
_DIFFERENTIABLE = re.compile(r"autograd::Function|\bAutograd\w*\b|CompositeImplicitAutograd")
