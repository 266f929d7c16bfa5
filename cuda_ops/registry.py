"""Finds operators by name, loads them on first use and reloads them in place.

A reload is a transaction. Everything that can fail (build, open, validate, ask
the plugins) happens before anything that callers see changes; then slots are
pointed at the new functions and the Python side's :class:`Generation` is
swapped. An operator's schema is defined, and its trampolines registered, once.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from cuda_ops.build import cache, compiling, debug, guests
from cuda_ops.build.advice import dev_command
from cuda_ops.build.discovery import (
    BUILTIN_ROOT,
    Pair,
    Problem,
    Text,
    content_hash,
    root_problem,
    survey,
)
from cuda_ops.build.provenance import DamagedError
from cuda_ops.build.source_text import Kind
from cuda_ops.dispatch import compile_tag, described
from cuda_ops.dispatch.described import DescribedGuest
from cuda_ops.dispatch.generation import Generation
from cuda_ops.dispatch.library import Library, open_library
from cuda_ops.dispatch.operator import Operator, redefining
from cuda_ops.errors import BuildError, CudaOpsError, DiscoveryError, ManifestError, PluginError
from cuda_ops.names import HOME, apart, full, keyed, suggested, unknown
from cuda_ops.plugins import Plugins, plugin_files
from cuda_ops.spec import OpSpec

#: Where environments keep packages.
_INSTALLED = {"site-packages", "dist-packages"}


class Registry:
    """All operators of one process."""

    def __init__(self, roots: Iterable[Path] = ()) -> None:
        self._lock = threading.RLock()
        self.plugins = Plugins()
        self._extra_roots = list(roots)
        self._installed_roots: list[Path] = []
        self._pairs: dict[str, Pair] | None = None
        self._operators: dict[str, Operator] = {}
        self._of_pair: dict[str, dict[str, Operator]] = {}
        self._guests: dict[str, Any] = {}
        self._registered: dict[str, OpSpec] = {}
        self._libraries: dict[str, Path] = {}
        #: Opened to ask what they call, and loaded next.
        self._opened: dict[Path, Library] = {}
        self._texts: dict[str, str] = {}
        self._plugin_texts: dict[str, str] = {}
        self._loading: list[str] = []
        self._under_way: list[str] = []
        self._loader: int | None = None
        #: Files in the roots that form no operator; the operators beside them work.
        self.problems: list[Problem] = []
        #: Why a pair cannot be used, by key: the error that its use raises.
        self.failures: dict[str, CudaOpsError] = {}

    # --- finding -----------------------------------------------------------------

    def pairs(self) -> dict[str, Pair]:
        """Returns the pairs of every root, by key. Scans on first use and in :meth:`rescan`."""
        if self._pairs is None:
            self.rescan()
        assert self._pairs is not None
        return self._pairs

    def rescan(self) -> dict[str, Pair]:
        self._installed_roots = self.plugins.roots()
        roots = [BUILTIN_ROOT, *self._extra_roots]
        self._pairs, self.problems = survey(roots, self._installed_roots)
        return self._pairs

    def left_aside(self) -> list[tuple[Pair, Pair]]:
        """Returns the pairs of installed packages that are not used, each with the pair of an added
        root that is used in its place.
        """
        used, added = self.pairs(), {root.resolve() for root in self._extra_roots}
        others = [root for root in self._installed_roots if root not in added]
        found = survey([], others)[0] if added else {}
        return [
            (pair, used[key])
            for key, pair in found.items()
            if key in used and used[key].root in added
        ]

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

    def drop_root(self, root: Path) -> None:
        """Forgets an added folder of operators; those that are loaded go on serving."""
        self._extra_roots[:] = [one for one in self._extra_roots if one.resolve() != root.resolve()]
        self._pairs = None

    # --- using -------------------------------------------------------------------

    def public(self, key: str) -> Any:
        """Returns what ``cuda_ops.<op>`` is, or ``my_ops.<op>`` for the key ``my_ops::<op>``: the
        public function, or a guest's module.

        Raises:
            AttributeError: no such operator.
            CudaOpsError: it exists and cannot be used; says why.
        """
        if (operator := self._operators.get(key)) is not None:
            return operator.public
        if key in self._guests:
            return self._guests[key]
        pair = self._pair_of(key)
        if pair is None:
            self._refuse_unfinished(key)
            raise AttributeError(self._unknown(key))
        self.load(pair)
        if key in self._operators:
            return self._operators[key].public
        if pair in self._guests:
            return self._guests[pair]
        raise AttributeError(self._unknown(key))

    def _unknown(self, key: str) -> str:
        """Says that there is no such operator, and what may be the reason."""
        namespace, name = apart(key)
        what = "module" if namespace == HOME else "namespace"
        text = f"{what} {namespace!r} has no operator {name!r}"
        if others := [other for other in self._elsewhere(name) if other in self.pairs()]:
            text += f"; there is torch.ops.{' and torch.ops.'.join(map(_shown, others))}"
        else:
            own = (key for key in self.pairs() if apart(key)[0] == namespace)
            text += suggested([name], own)
        if unusable := "; ".join(self.plugins.problems.values()):
            text += f"; what could not be used: {unusable}"
        return text

    def _elsewhere(self, name: str) -> dict[str, Pair]:
        """Returns the pair of an operator with this name in each namespace that may have one, by
        the operator's key. A pair whose name begins the operator's gives way to one with more.
        """
        spaces = dict.fromkeys(pair.namespace for pair in self.pairs().values())
        found = {key: self._pair_of(key) for key in (keyed(space, name) for space in spaces)}
        pairs = {key: self.pairs()[pair] for key, pair in found.items() if pair is not None}
        longest = max((len(pair.stem) for pair in pairs.values()), default=0)
        return {key: pair for key, pair in pairs.items() if len(pair.stem) == longest}

    def key_of(self, name: str) -> str:
        """Returns the key of the operator that Python code calls so: by its key, by its name in
        the dispatcher (``cuda_ops::silu``), or by its name alone, where only one namespace has it
        or ``cuda_ops`` does.
        """
        if "::" in name:
            return keyed(*apart(name))
        found = [*self._elsewhere(name)]
        return found[0] if len(found) == 1 else name

    def key_in_command(self, name: str) -> str:
        """Returns the key of the operator that a command's user calls so. A name alone is first one
        of an added root, then one of the project in the current folder.

        Raises:
            DiscoveryError: several namespaces have an operator of this name.
        """
        if "::" in name:
            return keyed(*apart(name))
        found = self._elsewhere(name)
        added = [root.resolve() for root in self._extra_roots]
        here = Path.cwd()
        own = self.roots_in(here) if (here / "pyproject.toml").is_file() else []
        for roots in (added, own):
            if among := {key: pair for key, pair in found.items() if pair.root in roots}:
                found = among
                break
        if len(found) > 1:
            raise DiscoveryError(
                f"operator {name!r}: expected a full name, {' or '.join(map(full, found))}, got "
                "one that several namespaces have"
            )
        return next(iter(found), name)

    def roots_in(self, folder: Path) -> list[Path]:
        """Returns the roots in a folder, but for those of packages that are installed there, in a
        virtual environment.
        """
        self.pairs()  # which asks for the roots
        roots = dict.fromkeys((BUILTIN_ROOT.resolve(), *self._installed_roots))
        own = [root for root in roots if root.is_relative_to(folder)]
        return [root for root in own if not _INSTALLED & {*root.relative_to(folder).parts}]

    def part_of(self, op: OpSpec, name: str) -> str:
        """Returns the key of an operator that ``.calls`` of another names: in the namespace of that
        one, else in ``cuda_ops``.
        """
        own = keyed(op.namespace, name)
        return keyed(*apart(name)) if "::" in name or self._pair_of(own) is None else own

    def define(self, namespace: str, name: str) -> bool:
        """Loads what defines ``torch.ops.<namespace>.<name>``, as far as texts tell: an operator,
        or guests that register themselves.

        Returns:
            Whether anything may.

        Raises:
            AttributeError: no operator of ours has this name.
            CudaOpsError: what may define it cannot be used; says why.
        """
        key, pairs = keyed(namespace, name), tuple(self.pairs().values())
        if any(pair.defines(namespace, name) for pair in pairs):
            with contextlib.suppress(AttributeError):  # only its name is like that
                self.public(key)
                return True
        guests = [pair.key for pair in pairs if pair.registers(namespace, name)]
        for guest in guests:
            if guest not in self._guests:
                self.load(guest)
        if not guests and namespace == HOME:
            self.public(key)  # which says why there is none
        return bool(guests)

    def operators(self, pair: str) -> dict[str, Operator]:
        """Returns the operators of the pair with this key, by key; loads it if need be. A guest has
        those that its plugin makes of its functions.
        """
        if pair not in self._of_pair:
            self.load(pair)
        return self._of_pair[pair]

    def specs(self, pair: str) -> dict[str, OpSpec]:
        """Returns what is declared of a pair's operators, by key: of :meth:`operators`, and of
        those that a guest registers itself. The first stands for the pair in tables.
        """
        own = {key: operator.spec for key, operator in self.operators(pair).items()}
        registered = {op.key: op for op in self._registered.values() if op.guest == pair}
        first = {pair: own[pair]} if pair in own else {}
        return {**first, **own, **registered}

    def registered(self, name: str) -> OpSpec | None:
        """Returns what a plugin says of an operator that a guest registers itself, ``my_ops::mul``;
        loads the guest if need be.
        """
        namespace, short = apart(name)
        if namespace != HOME and name not in self._registered:
            with contextlib.suppress(AttributeError):
                self.define(namespace, short)
        return self._registered.get(name)

    def loaded(self, key: str) -> Operator | None:
        """Returns the operator if its library is open."""
        return self._operators.get(key)

    def _refuse_unfinished(self, name: str) -> None:
        for problem in self.problems:
            if problem.name == name and name not in self.pairs():
                raise DiscoveryError(problem.text)

    @property
    def loading(self) -> bool:
        """Whether this thread is in the middle of :meth:`load`."""
        return self._loader == threading.get_ident()

    def _pair_of(self, key: str) -> str | None:
        """Returns an operator's pair: ``silu_backward`` is in ``silu``. The longest one wins."""
        fitting = [pair for pair in self.pairs() if key == pair or key.startswith(f"{pair}_")]
        return max(fitting, key=len, default=None)

    # --- loading -----------------------------------------------------------------

    def load(self, key: str, library: Path | None = None) -> None:
        """Opens the library of the pair with this key and registers it, or swaps it in for the one
        loaded before.

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
            if key in self._under_way:
                raise PluginError(
                    f"{_shown(key)} is used while it is loaded; import it in the function of the "
                    "plugin that uses it, and let a hook use op.function"
                )
            outer, self._loader = self._loader, threading.get_ident()
            self._under_way.append(key)
            try:
                self._load(key, library)
            finally:
                self._under_way.pop()
                self._loader = outer

    def _load(self, key: str, library: Path | None) -> None:
        pair = self.pairs().get(key)
        if pair is None:
            self._refuse_unfinished(key)
            raise BuildError(unknown([key], self.pairs()))
        if library is None and key in self.failures and key not in self._of_pair:
            raise self.failures[key]
        if pair.problem:
            raise DiscoveryError(pair.problem)
        text = None
        if library is None:
            text = pair.read()
            library = self._built_library(pair, text)
        if pair.kind is not Kind.NATIVE:
            self._load_guest(pair, library)
        else:
            opened = self._opened.pop(library, None) or open_library(
                library, pair.stem, pair.namespace
            )
            if text is not None and opened.source_hash not in ("", text.hash):
                warnings.warn(
                    f"{_shown(key)}: its sources changed since it was built; run {dev_command()}",
                    stacklevel=5,
                )
            self._load_called(opened)
            self._swap(pair, lambda: opened)
        self._libraries[key] = library
        self.failures.pop(key, None)
        for operator in self._of_pair[key].values():
            self.plugins.tell_loaded(operator.spec, library, operator.generation)

    def _load_guest(self, pair: Pair, library: Path) -> None:
        """Opens a guest's library, and makes operators of what its plugin says, if it has one."""
        key = pair.key
        if self._libraries.get(key) != library or key not in self._guests:
            self._guests[key] = guests.load(pair, library)
            self._libraries[key] = library  # it serves, whatever its plugin says
        module = self._guests[key]
        if pair.plugin.is_file():
            self._swap(
                pair,
                lambda: described.describe(pair, library, module, self.plugins.guest(key)),
            )
        else:
            self.plugins.load_pair_plugin(pair)  # forgets one that was there
            self._of_pair[key] = {}
            self._plugin_texts[key] = self.plugin_text(pair)
        if key in self._operators:
            described.attach(self._operators[key].public, module)

    def _load_called(self, library: Library) -> None:
        """Loads the operators that this library's functions call: the dispatcher must know them."""
        self._loading.append(library.pair)
        try:
            for op in library.ops.values():
                for name in op.calls:
                    part = self.part_of(op, name)
                    if self._pair_of(part) not in self._loading:  # pairs may call each other
                        self._load_part(op, part)
        finally:
            self._loading.pop()

    def _load_part(self, op: OpSpec, part: str) -> None:
        try:
            self.public(part)
        except AttributeError as error:
            raise ManifestError(
                f"{op.qualname} calls {part!r}, and there is no such operator"
            ) from error
        except CudaOpsError as error:
            raise BuildError(f"{op.qualname} calls {part!r}: {error}") from error

    def called(self, pair: Pair, library: Path) -> list[str]:
        """Returns the keys of the other pairs that a library's operators call."""
        if pair.kind is not Kind.NATIVE:
            return []
        opened = self._opened[library] = open_library(library, pair.stem, pair.namespace)
        calls = [(op, name) for op in opened.ops.values() for name in op.calls]
        pairs = [self._pair_of(self.part_of(op, name)) for op, name in calls]
        return [key for key in dict.fromkeys(pairs) if key not in (None, pair.key)]

    def fail(self, key: str, error: CudaOpsError) -> None:
        """Remembers why a pair cannot be used; an older library of it goes on serving."""
        self.failures[key] = error

    def library_of(self, key: str) -> Path | None:
        """Returns the library that serves a pair in this process."""
        return self._libraries.get(key)

    def serves(self, pair: Pair, library: Path) -> bool:
        """Says whether this library of the pair is loaded, with the plugins as they are now."""
        if self.library_of(pair.key) != library:
            return False
        return self._plugin_texts.get(pair.key) == self.plugin_text(pair)

    def plugin_text(self, pair: Pair) -> str:
        """Returns a digest of what the plugins of a pair say now."""
        return content_hash([*plugin_files(pair), *self.plugins.installed_files()])

    def _built_library(self, pair: Pair, text: Text) -> Path:
        where = shlex.quote(str(pair.root))
        root = f"--root {where} " if pair.root != BUILTIN_ROOT.resolve() else ""
        build = f"{dev_command()} {root}{pair.key}"
        debugged = pair.key in debug.asked(self.pairs())
        try:
            library = compiling.find_library(pair, text, debugged)
        except DamagedError as error:
            package = "cuda_ops" if pair.root == BUILTIN_ROOT.resolve() else pair.root.parent.name
            raise BuildError(
                f"{_shown(pair.key)}: {error}: the file is damaged; run "
                f"pip install --force-reinstall --no-deps {package}, or {build}"
            ) from error
        if library is not None:
            return library
        if debugged:
            raise BuildError(
                f"{_shown(pair.key)}: {debug.VARIABLE} asks for its debug build, and there is none "
                f"of the present sources: run {dev_command()} {root}--debug {pair.key}"
            )
        last = compiling.last_failure(pair, text)
        raise BuildError(
            f"{_shown(pair.key)} is not built: run {build} or pip install -e ."
            + (f"\nIts last build failed: {last}" if last else "")
        )

    def _swap(self, pair: Pair, opened: Callable[[], Library | DescribedGuest]) -> None:
        undo = self.plugins.load_pair_plugin(pair)
        plugin_text = self.plugin_text(pair)
        before = self._of_pair.get(pair.key, {})
        try:
            library = opened()
            self._refuse_foreign(library)
            prepared = {
                op.key: Operator.prepare(
                    op, self.plugins, plugin_text, library.path, library.calls.get(op.name)
                )
                for op in library.ops.values()
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
            if isinstance(library, Library):
                self._point_at(library, before.values())
        self._of_pair[pair.key] = {name: self._operators[name] for name in prepared}
        others = {name: op for name, op in self._registered.items() if op.guest != pair.key}
        self._registered = {**others, **library.registered}
        self._plugin_texts[pair.key] = plugin_text
        made_from = library.source_hash or cache.source_hash(library.path)
        self._texts[pair.key] = f"{made_from} {plugin_text}"
        compile_tag.change(f"{key}: {text}" for key, text in sorted(self._texts.items()))
        if changed:
            # Traced graphs hold the old shapes, gradients or schema.
            torch._dynamo.reset()

    def _point_at(self, library: Library, before: Iterable[Operator]) -> None:
        """Serves calls with the kernels of a library from now on."""
        for kernel in library.kernels:
            self._operators[keyed(library.namespace, kernel.op)].point_at(library, kernel)
        for operator in before:
            name = operator.spec.name
            operator.drop_keys(library, {k.key for k in library.kernels if k.op == name})

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

    def _refuse_foreign(self, library: Library | DescribedGuest) -> None:
        for op in library.ops.values():
            owner = self._operators.get(op.key)
            if owner is not None and owner.spec.stem != library.stem:
                raise ManifestError(
                    f"{op.qualname} of pair {library.stem!r} is already defined by pair "
                    f"{owner.spec.stem!r}; rename one of them"
                )


def _shown(key: str) -> str:
    """Returns how errors call an operator: ``cuda_ops.silu``, or ``my_ops.silu``."""
    return ".".join(apart(key))


_making = threading.RLock()
_maker: int | None = None
_unfinished: Registry | None = None
_registry: Registry | None = None


def registry() -> Registry:
    """Returns the process's registry."""
    # functools.cache makes one for each of several threads that come first.
    global _maker, _registry, _unfinished
    if _registry is None:
        with _making:
            outer, _maker = _maker, threading.get_ident()
            try:
                if _unfinished is None:
                    _unfinished = Registry()
                _unfinished.plugins.load_installed()  # which may ask for the registry in turn
            finally:
                _maker = outer
            _registry = _unfinished
    return _registry


def is_made() -> bool:
    """Says whether the installed plugins have been imported."""
    return _registry is not None


def is_loading() -> bool:
    """Says whether this thread is loading a pair."""
    return _unfinished is not None and _unfinished.loading


def is_importing() -> bool:
    """Says whether this thread is importing the installed plugins."""
    return _maker == threading.get_ident()


def function(key: str) -> Callable[..., Any]:
    """Returns the operator of any pair as formulas call it: see :attr:`OpSpec.function`."""
    if torch.compiler.is_dynamo_compiling():
        namespace, name = apart(key)
        overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
        return overload
    operator = registry().loaded(key)
    if operator is None:
        registry().public(key)  # which loads it, or says why not
        operator = registry().loaded(key)
        assert operator is not None, f"{key} is no native operator"
    return operator.direct


def all_operators(where: Callable[[Pair], bool] = lambda _: True) -> dict[str, Operator]:
    """Returns every operator that can be used, by key; leaves out pairs that cannot, and guests
    that nothing describes.
    """
    found: dict[str, Operator] = {}
    for key, pair in registry().pairs().items():
        if pair.is_declared and where(pair):
            try:
                found.update(registry().operators(key))
            except CudaOpsError:
                continue
    return found


def register_all() -> list[str]:
    """Loads every operator that can be used, so that C++ finds them all in the dispatcher.

    Python finds an operator at its first use. What asks the dispatcher itself has to find it there:
    ``torch._inductor.aoti_load_package``, ``torch.jit.load``, an extension. Operators that are not
    built are left out; ``cuda_ops.<op>`` says why.

    Returns:
        Their keys, ``silu`` or ``my_ops::silu``, sorted.

    Example::

        assert "silu" in cuda_ops.register_all()
    """
    return sorted(all_operators())


def operators_of(names: Iterable[str]) -> list[str]:
    """Returns the keys once each; the name of a pair stands for all operators that it defines."""
    declared = {key for key, pair in registry().pairs().items() if pair.is_declared}
    keys = map(registry().key_of, names)
    each = (registry().specs(key) if key in declared else [key] for key in keys)
    return list(dict.fromkeys(chain.from_iterable(each)))
