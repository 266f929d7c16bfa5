"""Finds operators by name, loads them on first use and reloads them in place.

A reload is a transaction. Everything that can fail (build, open, validate, ask
the plugins) happens before anything that callers see changes; then slots are
pointed at the new functions and the Python side's :class:`Generation` is
swapped. An operator's schema is defined, and its trampolines registered, once.
"""

from __future__ import annotations

import shlex
import threading
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from cuda_ops.build import cache, compiling, guests
from cuda_ops.build.discovery import (
    BUILTIN_ROOT,
    Kind,
    Pair,
    Problem,
    Text,
    content_hash,
    root_problem,
    survey,
)
from cuda_ops.build.provenance import DamagedError
from cuda_ops.dispatch import compile_tag
from cuda_ops.dispatch.generation import Generation
from cuda_ops.dispatch.library import Library, open_library
from cuda_ops.dispatch.operator import Operator, redefining
from cuda_ops.errors import BuildError, CudaOpsError, DiscoveryError, ManifestError, PluginError
from cuda_ops.plugins import Plugins, plugin_files


class Registry:
    """All operators of one process."""

    def __init__(self, roots: Iterable[Path] = ()) -> None:
        self._lock = threading.RLock()
        self.plugins = Plugins()
        self._extra_roots = list(roots)
        self._pairs: dict[str, Pair] | None = None
        self._operators: dict[str, Operator] = {}
        self._stems: dict[str, dict[str, Operator]] = {}
        self._guests: dict[str, Any] = {}
        self._libraries: dict[str, Path] = {}
        self._texts: dict[str, str] = {}
        self._loading: list[str] = []
        self._under_way: list[str] = []
        self._loader: int | None = None
        #: Files in the roots that form no operator; the operators beside them work.
        self.problems: list[Problem] = []
        #: Why a pair cannot be used, by stem: the error that its use raises.
        self.failures: dict[str, CudaOpsError] = {}

    # --- finding -----------------------------------------------------------------

    def pairs(self) -> dict[str, Pair]:
        """Returns the pairs of every root, by stem. Scans on first use and in :meth:`rescan`."""
        if self._pairs is None:
            self.rescan()
        assert self._pairs is not None
        return self._pairs

    def rescan(self) -> dict[str, Pair]:
        roots = [BUILTIN_ROOT, *self.plugins.roots(), *self._extra_roots]
        self._pairs, self.problems = survey(roots)
        return self._pairs

    def add_root(self, root: Path) -> None:
        """Adds a folder of operators.

        Raises:
            DiscoveryError: it does not exist, or holds neither kernels/ nor bindings/.
        """
        if text := root_problem(root.resolve()):
            raise DiscoveryError(text)
        if root.resolve() not in [r.resolve() for r in self._extra_roots]:
            self._extra_roots.append(root)
            self._pairs = None

    # --- using -------------------------------------------------------------------

    def public(self, name: str) -> Any:
        """Returns what ``cuda_ops.<name>`` is: the public function, or a guest's module.

        Raises:
            AttributeError: no such operator.
            CudaOpsError: it exists and cannot be used; says why.
        """
        if (operator := self._operators.get(name)) is not None:
            return operator.public
        if name in self._guests:
            return self._guests[name]
        stem = self._stem_of(name)
        if stem is None:
            self._refuse_unfinished(name)
            unusable = "; ".join(self.plugins.problems.values())
            hint = f"; what could not be used: {unusable}" if unusable else ""
            raise AttributeError(f"module 'cuda_ops' has no operator {name!r}{hint}")
        self.load(stem)
        if stem in self._guests:
            return self._guests[stem]
        if name not in self._operators:
            raise AttributeError(f"module 'cuda_ops' has no operator {name!r}")
        return self._operators[name].public

    def operators(self, stem: str) -> dict[str, Operator]:
        """Returns the operators of one pair; loads it if need be."""
        if stem not in self._stems:
            self.load(stem)
        return self._stems.get(stem, {})

    def loaded(self, name: str) -> Operator | None:
        """Returns the operator if its library is open."""
        return self._operators.get(name)

    def _refuse_unfinished(self, name: str) -> None:
        for problem in self.problems:
            if problem.name == name and name not in self.pairs():
                raise DiscoveryError(problem.text)

    @property
    def loading(self) -> bool:
        """Whether this thread is in the middle of :meth:`load`."""
        return self._loader == threading.get_ident()

    def _stem_of(self, name: str) -> str | None:
        """Returns an operator's pair: ``silu_backward`` is in ``silu``. The longest stem wins."""
        fitting = [s for s in self.pairs() if name == s or name.startswith(f"{s}_")]
        return max(fitting, key=len, default=None)

    # --- loading -----------------------------------------------------------------

    def load(self, stem: str, library: Path | None = None) -> None:
        """Opens the pair's library and registers it, or swaps it in for the one loaded before.

        ``library`` is what a build published; without it the best one that
        exists for the present sources is taken. On any error what was loaded
        before goes on serving.

        Raises:
            BuildError: nothing is built for this pair or one that it calls, or its build failed.
            DiscoveryError: there are files of that name, and they form no operator.
            ManifestError: the library contradicts itself or was refused.
            PluginError: a plugin of this operator failed.
        """
        with self._lock:
            if stem in self._under_way:
                raise PluginError(
                    f"cuda_ops.{stem} is used while it is loaded; import it in the function of the "
                    "plugin that uses it, and let a hook use op.function"
                )
            outer, self._loader = self._loader, threading.get_ident()
            self._under_way.append(stem)
            try:
                self._load(stem, library)
            finally:
                self._under_way.pop()
                self._loader = outer

    def _load(self, stem: str, library: Path | None) -> None:
        pair = self.pairs().get(stem)
        if pair is None:
            self._refuse_unfinished(stem)
            raise BuildError(f"no operator {stem!r}; known: {', '.join(self.pairs())}")
        if library is None and stem in self.failures and stem not in self._stems:
            raise self.failures[stem]
        if pair.problem:
            raise DiscoveryError(pair.problem)
        text = None
        if library is None:
            text = pair.read()
            library = self._built_library(pair, text)
        if pair.kind is not Kind.NATIVE:
            self._guests[stem] = guests.load(pair, library)
            self._libraries[stem] = library
            return
        opened = open_library(library, stem)
        if text is not None and opened.source_hash not in ("", text.hash):
            warnings.warn(
                f"cuda_ops.{stem}: its sources changed since it was built; "
                "run python compile_dev.py",
                stacklevel=5,
            )
        self._load_called(opened)
        self._swap(pair, opened)
        self._libraries[stem] = library
        self.failures.pop(stem, None)
        for operator in self._stems[stem].values():
            self.plugins.tell_loaded(operator.spec, library, operator.generation)

    def _load_called(self, library: Library) -> None:
        """Loads the operators that this library's functions call: the dispatcher must know them."""
        self._loading.append(library.stem)
        try:
            for op in library.ops.values():
                for name in op.calls:
                    if self._stem_of(name) not in self._loading:  # pairs may call each other
                        self._load_part(op.name, name)
        finally:
            self._loading.pop()

    def _load_part(self, op: str, part: str) -> None:
        try:
            self.public(part)
        except AttributeError as error:
            raise ManifestError(
                f"cuda_ops::{op} calls {part!r}, and there is no such operator"
            ) from error
        except CudaOpsError as error:
            raise BuildError(f"cuda_ops::{op} calls {part!r}: {error}") from error

    def called(self, pair: Pair, library: Path) -> list[str]:
        """Returns the stems of the other pairs that a library's operators call."""
        if pair.kind is not Kind.NATIVE:
            return []
        ops = open_library(library, pair.stem).ops.values()
        stems = [self._stem_of(name) for op in ops for name in op.calls]
        return [stem for stem in dict.fromkeys(stems) if stem not in (None, pair.stem)]

    def fail(self, stem: str, error: CudaOpsError) -> None:
        """Remembers why a pair cannot be used; an older library of it goes on serving."""
        self.failures[stem] = error

    def library_of(self, stem: str) -> Path | None:
        """Returns the library that serves a pair in this process."""
        return self._libraries.get(stem)

    def _built_library(self, pair: Pair, text: Text) -> Path:
        where = shlex.quote(str(pair.root))
        root = f"--root {where} " if pair.root != BUILTIN_ROOT.resolve() else ""
        build = f"python compile_dev.py {root}{pair.stem}"
        try:
            library = compiling.find_library(pair, text)
        except DamagedError as error:
            package = "cuda_ops" if pair.root == BUILTIN_ROOT.resolve() else pair.root.parent.name
            raise BuildError(
                f"cuda_ops.{pair.stem}: {error}: the file is damaged; run "
                f"pip install --force-reinstall --no-deps {package}, or {build}"
            ) from error
        if library is not None:
            return library
        last = compiling.last_failure(pair, text)
        raise BuildError(
            f"cuda_ops.{pair.stem} is not built: run {build} or pip install -e ."
            + (f"\nIts last build failed: {last}" if last else "")
        )

    def _swap(self, pair: Pair, library: Library) -> None:
        self._refuse_foreign(library)
        undo = self.plugins.load_pair_plugin(pair)
        plugin_text = content_hash([*plugin_files(pair), *self.plugins.installed_files()])
        before = self._stems.get(pair.stem, {})
        try:
            prepared = {
                name: Operator.prepare(op, self.plugins, plugin_text, library.path)
                for name, op in library.ops.items()
            }
            redefined = [
                operator
                for name, operator in before.items()
                if name in prepared and operator.must_redefine(prepared[name])
            ]
            new = self._new_operators(prepared)
        except BaseException:  # Ctrl-C as well
            undo()
            raise
        changed = False
        with redefining(redefined):
            for name, generation in prepared.items():
                if name not in new:
                    changed |= self._operators[name].become(generation)
            self._operators |= new
            present = {(kernel.op, kernel.key) for kernel in library.kernels}
            for kernel in library.kernels:
                self._operators[kernel.op].point_at(library, kernel)
            for name, operator in before.items():
                operator.drop_keys(library, {key for op, key in present if op == name})
        self._stems[pair.stem] = {name: self._operators[name] for name in prepared}
        made_from = library.source_hash or cache.source_hash(library.path)
        self._texts[pair.stem] = f"{made_from} {plugin_text}"
        compile_tag.change(f"{stem}: {text}" for stem, text in sorted(self._texts.items()))
        if changed:
            # Traced graphs hold the old shapes, gradients or schema.
            torch._dynamo.reset()

    def _new_operators(self, prepared: dict[str, Generation]) -> dict[str, Operator]:
        """Defines the operators that the dispatcher does not know yet: all of them, or none."""
        new: dict[str, Operator] = {}
        try:
            for name, generation in prepared.items():
                if name not in self._operators:
                    new[name] = Operator(generation)
        except BaseException:
            for operator in new.values():
                operator.forget()
            raise
        return new

    def _refuse_foreign(self, library: Library) -> None:
        for name in library.ops:
            owner = self._operators.get(name)
            if owner is not None and owner.spec.stem != library.stem:
                raise ManifestError(
                    f"cuda_ops::{name} of pair {library.stem!r} is already defined by pair "
                    f"{owner.spec.stem!r}; rename one of them"
                )


_making = threading.RLock()
_unfinished: Registry | None = None
_registry: Registry | None = None


def registry() -> Registry:
    """Returns the process's registry."""
    # functools.cache makes one for each of several threads that come first.
    global _registry, _unfinished
    if _registry is None:
        with _making:
            if _unfinished is None:
                _unfinished = Registry()
            _unfinished.plugins.load_installed()  # which may ask for the registry in turn
            _registry = _unfinished
    return _registry


def function(name: str) -> Callable[..., Any]:
    """Returns the operator of any pair as formulas call it: see :attr:`OpSpec.function`."""
    if torch.compiler.is_dynamo_compiling():
        overload: Callable[..., Any] = getattr(torch.ops.cuda_ops, name).default
        return overload
    registry().public(name)
    operator = registry().loaded(name)
    assert operator is not None, f"{name} is no native operator"
    return operator.direct


def all_operators(where: Callable[[Pair], bool] = lambda _: True) -> dict[str, Operator]:
    """Returns every native operator that can be used, by name; leaves out pairs that cannot."""
    found: dict[str, Operator] = {}
    for stem, pair in registry().pairs().items():
        if pair.kind is Kind.NATIVE and where(pair):
            try:
                found.update(registry().operators(stem))
            except CudaOpsError:
                continue
    return found


def operators_of(names: Iterable[str]) -> list[str]:
    """Returns the names once each; the name of a pair stands for all operators that it defines."""
    native = {s for s, pair in registry().pairs().items() if pair.kind is Kind.NATIVE}
    each = (registry().operators(n) if n in native else [n] for n in names)
    return list(dict.fromkeys(chain.from_iterable(each)))
