"""The plugin manager: which plugin answers a hook, in which order, and what a failing one costs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from cuda_ops import hookspecs
from cuda_ops.build.discovery import Pair
from cuda_ops.errors import ManifestError, PluginError
from cuda_ops.spec import GuestOperator, OpSpec


def plugin_files(pair: Pair) -> list[Path]:
    """Returns the pair's plugin file, and the files that plugins beside it share."""
    own = pair.plugin
    return [*([own] if own.is_file() else []), *sorted(own.parent.glob("_*.py"))]


def plugin_name(pair: str) -> str:
    """Returns the name of the plugin of a pair, by the pair's key, as a module and in errors."""
    return f"cuda_ops.ops.{pair.replace('::', '.')}"


#: What is not the plugin's fault. Other exceptions that do not derive from ``Exception`` are, such
#: as ``SystemExit`` and pytest's ``Skipped``.
_INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
_RULES = "cuda_ops.derive.rules"
#: The module of each derived answer. Those for tests and benchmarks are in the kits, which a
#: program that only calls operators never imports.
_DERIVED = {
    "cuda_ops_fake": _RULES,
    "cuda_ops_autograd": _RULES,
    "cuda_ops_autocast": _RULES,
    "cuda_ops_vmap": _RULES,
    "cuda_ops_sharding": _RULES,
    "cuda_ops_reference": "cuda_ops.testing.derived",
    "cuda_ops_samples": "cuda_ops.testing.derived",
    "cuda_ops_benchmarks": "cuda_ops.benchmarking.derived",
}


class Plugins:
    """Plugins of pairs, then installed ones, then the derivation plugin, in that order.

    pluggy would abort a call for every operator when one plugin raises, and
    keeps a plugin that failed validation; so hooks are asked one plugin at a
    time, and registration is undone when it fails. A failing hook costs the
    operators of the plugin's own roots; for those of others it is left out.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._of_pair: dict[str, Any] = {}
        self._installed: list[Any] = []
        self._loads: list[dict[str, Any]] = []
        self._derived: dict[str, Any] = {}
        #: The root of each pair that was loaded, and the roots that each plugin brought, by name.
        self._root_of: dict[str, Path] = {}
        self._roots: dict[str, list[Path]] = {}
        #: Plugins that could not be used, wholly or for one hook, by name, with the reason.
        self.problems: dict[str, str] = {}
        self._left_out: set[tuple[str, str]] = set()
        self._waiting = list(importlib.metadata.entry_points(group=hookspecs.PROJECT))

    def load_installed(self) -> None:
        """Imports the installed plugins; records in :attr:`problems` why one cannot be used.

        A package may import its own operators at its top: that calls this again and loads the
        plugin there, and the outer call finds it loaded.

        Raises:
            PluginError: a plugin's own module uses an operator, whose hooks would be read too late.
        """
        for entry_point in tuple(self._waiting):
            name = entry_point.name
            try:
                plugin = entry_point.load()
            except _INTERRUPTS:
                raise
            except BaseException as error:  # another package's module may raise anything
                self.problems[name] = (
                    f"plugin {name!r} ({entry_point.value}) failed to import: {error!r}"
                )
            else:
                if getattr(getattr(plugin, "__spec__", None), "_initializing", False):
                    raise PluginError(
                        f"{entry_point.value} uses an operator while it is imported; import the "
                        "operator in the function that uses it"
                    )
                if entry_point not in self._waiting:
                    continue
                try:
                    self.add(plugin, name)
                except PluginError as error:
                    self.problems[name] = str(error)
            if entry_point in self._waiting:
                self._waiting.remove(entry_point)

    def register(self, plugin: Any, name: str, pair: str | None = None) -> None:
        """Adds a plugin, of the pair with this key or of all operators, or leaves no trace of it.

        Raises:
            PluginError: a duplicate name, a hook that does not exist, a hook
                with an argument that its specification lacks, or a function
                named like a hook without ``@hookimpl``.
        """
        if self._manager.is_registered(plugin):
            raise PluginError(f"plugin {name!r}: registered already")
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise PluginError(f"plugin {name!r}: {error}") from error
        marker = f"{hookspecs.PROJECT}_impl"
        for attribute in dir(plugin):
            if attribute.startswith("cuda_ops_") and callable(getattr(plugin, attribute)):
                if not hasattr(getattr(plugin, attribute), marker):
                    self._manager.unregister(plugin)
                    raise PluginError(
                        f"plugin {name!r}: function {attribute!r} is named like a hook but is not "
                        "marked; write @hookimpl above it"
                    )
        for load in self._loads:
            if pair in (None, load["op"].pair):
                self._tell(plugin, name, load)

    def unregister(self, plugin: Any) -> None:
        self._manager.unregister(plugin)

    def add(self, plugin: Any, name: str) -> None:
        """Registers a plugin that is asked about every operator, as an installed one is."""
        self.register(plugin, name)
        self._installed.append(plugin)

    def load_pair_plugin(self, pair: Pair) -> Callable[[], None]:
        """Loads the plugin file of a pair again; without a file, forgets the one from before.

        Returns:
            A function that undoes it, for a reload that fails later on.

        Raises:
            PluginError: the file does not import or is not a valid plugin. The
                plugin loaded before, if any, stays.
        """
        self._root_of[pair.key] = pair.root
        path = pair.plugin
        before = self._of_pair.get(pair.key)
        name = plugin_name(pair.key)
        self.problems.pop(name, None)
        if not path.is_file():
            if before is not None:
                self._manager.unregister(before)
                del self._of_pair[pair.key]
            return lambda: self._restore(pair.key, name, None, before)
        module = _import_file(path, name)
        if before is not None:
            self._manager.unregister(before)
        try:
            self.register(module, name, pair.key)
        except PluginError:
            if before is not None:
                self._manager.register(before, name)
                sys.modules[name] = before
            raise
        self._of_pair[pair.key] = module
        return lambda: self._restore(pair.key, name, module, before)

    def _restore(self, key: str, name: str, now: Any, before: Any) -> None:
        if now is not None:
            self._manager.unregister(now)
            del self._of_pair[key]
            sys.modules.pop(name, None)
        if before is not None:
            self._manager.register(before, name)
            self._of_pair[key] = sys.modules[name] = before

    def installed_files(self) -> list[Path]:
        """Returns the files of the installed plugins: compiled graphs depend on what they say."""
        files = (getattr(plugin, "__file__", None) for plugin in self._installed)
        return sorted(Path(file) for file in files if file)

    def roots(self) -> list[Path]:
        """Returns the operator roots of the plugins; one that raises goes to :attr:`problems`."""
        self._roots = {}
        for name, plugin in self._manager.list_name_plugin():
            if plugin is not None:
                try:
                    for answer in self._call("cuda_ops_roots", plugin, ""):
                        self._roots[name] = [_resolved(root, name) for root in answer]
                except PluginError as error:
                    self._leave_out(name, "cuda_ops_roots", error)
        return [root for roots in self._roots.values() for root in roots]

    def guest(self, pair: str) -> list[GuestOperator]:
        """Returns what the plugin of a guest, by the pair's key, says of its functions.

        Raises:
            PluginError: it raised, or its answer is not what the hook expects.
        """
        own = self._of_pair.get(pair)
        about = f", guest {pair!r}"
        answers = [] if own is None else self._call("cuda_ops_guest", own, about)
        return [operator for answer in answers for operator in answer]

    def ask(self, hook: str, op: OpSpec) -> Any:
        """Returns the first answer to a per-operator hook that is not ``None``.

        Raises:
            PluginError: a plugin raised; names plugin, hook and operator.
        """
        return next(self._answers(hook, op), None)

    def peers(self, op: OpSpec) -> dict[str, Any] | None:
        """Joins all answers to ``cuda_ops_peers``; where names are equal, the first one asked wins.
        ``None`` if there is no answer.

        Raises:
            PluginError: a plugin raised; names plugin, hook and operator.
        """
        found: dict[str, Any] | None = None
        for answer in self._answers("cuda_ops_peers", op):
            found = found or {}
            found = {**found, **{n: peer for n, peer in answer.items() if n not in found}}
        return found

    def _answers(self, hook: str, op: OpSpec) -> Iterator[Any]:
        """Yields the answers that are not ``None``, in the order of the plugins."""
        about = f", operator {op.key!r}"
        if (own := self._of_pair.get(op.pair)) is not None:
            yield from self._call(hook, own, about, op=op)
        for plugin in reversed(self._installed):
            name = self._manager.get_name(plugin) or ""
            try:
                yield from self._call(hook, plugin, about, op=op)
            except PluginError as error:
                if self._root_of.get(op.pair) in self._roots.get(name, ()):
                    raise
                self._leave_out(name, hook, error)
        # What another library registers has rules of its own.
        if hook in _DERIVED and not (op.foreign and _DERIVED[hook] == _RULES):
            yield from self._call(hook, self._derivation(_DERIVED[hook]), about, op=op)

    def _leave_out(self, name: str, hook: str, error: PluginError) -> None:
        """Records why a plugin's answer is skipped, and warns once for each hook."""
        if (name, hook) in self._left_out:
            return
        self._left_out.add((name, hook))
        before = self.problems.get(name)
        self.problems[name] = f"{before}\n{error}" if before else str(error)
        warnings.warn(f"{error}; it is left out", stacklevel=2)

    def _derivation(self, module: str) -> Any:
        """Returns the part of the derivation plugin in ``module``; imports it when first asked."""
        if module not in self._derived:
            plugin = importlib.import_module(module)
            self.register(plugin, module)
            self._derived[module] = plugin
        return self._derived[module]

    def tell_loaded(self, op: OpSpec, library: Path, generation: int) -> None:
        """Fires ``cuda_ops_op_loaded`` in the plugin of the pair and in those of all operators.

        Not through pluggy's own history, which would tell a pair's plugin of
        every operator and leave out the plugins after one that raises.

        The operator is loaded by now: what a plugin raises costs the plugin alone.
        """
        load = {"op": op, "library": library, "generation": generation}
        self._loads.append(load)
        others = [plugin for pair, plugin in self._of_pair.items() if pair != op.pair]
        for name, plugin in self._manager.list_name_plugin():
            if plugin is not None and not any(plugin is other for other in others):
                self._tell(plugin, name, load)

    def _tell(self, plugin: Any, name: str, load: dict[str, Any]) -> None:
        try:
            self._call("cuda_ops_op_loaded", plugin, f", operator {load['op'].key!r}", **load)
        except PluginError as error:
            self._leave_out(name, "cuda_ops_op_loaded", error)

    def _call(self, hook: str, plugin: Any, about: str, **arguments: Any) -> list[Any]:
        """Returns the plugin's answer; nothing if it lacks the hook or answers ``None``.

        Raises:
            PluginError: it raised, or its answer is not what the hook expects.
        """
        expected, is_right = hookspecs.ANSWERS[hook]
        caller = getattr(self._manager.hook, hook)
        for implementation in caller.get_hookimpls():
            if implementation.plugin is plugin:
                where = f"plugin {implementation.plugin_name!r}, hook {hook}{about}"
                try:
                    answer = implementation.function(
                        *(arguments[name] for name in implementation.argnames)
                    )
                    if isinstance(answer, Iterator):
                        answer = list(answer)
                    right = answer is None or is_right(answer)
                except (PluginError, ManifestError):  # which say of what they speak
                    raise
                except _INTERRUPTS:
                    raise
                except BaseException as error:
                    raise PluginError(f"{where}: {type(error).__name__}: {error}") from error
                if not right:
                    raise PluginError(f"{where}: expected {expected} or None, got {answer!r}")
                return [] if answer is None else [answer]
        return []


def _resolved(root: str | os.PathLike[str], plugin: str) -> Path:
    try:
        return Path(root).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links
        raise PluginError(
            f"plugin {plugin!r}, hook cuda_ops_roots: expected folders, got {root!r}: {error}"
        ) from error


def _import_file(path: Path, name: str) -> ModuleType:
    """Imports a file afresh, whatever is cached under its name."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        # Compiled from text: a cached .pyc is trusted by mtime, too coarse for quick edits.
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    except BaseException as error:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        if isinstance(error, _INTERRUPTS):
            raise
        raise PluginError(f"plugin {name!r}: {path}: {type(error).__name__}: {error}") from error
    return module


def iter_hook_names() -> Iterator[str]:
    """Returns the names of all hooks, for docs and tests."""
    return (name for name in vars(hookspecs) if name.startswith("cuda_ops_"))
