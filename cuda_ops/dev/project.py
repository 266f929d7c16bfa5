"""The project in the current folder: a package of your own, installed or not.

A project is a folder whose ``pyproject.toml`` names a module in the group of entry points
``cuda_ops``. Commands that run there use it as if it were installed: its plugin is asked, which
says where its operators are, and processes that they start find it too.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from cuda_ops import hookspecs
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.errors import DiscoveryError, PluginError
from cuda_ops.registry import is_made, registry

#: What stands for the installer of a project's package while it is not installed.
INSTALLER = "cuda_ops project"
#: What a project's package calls itself while it is not installed.
_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"


def enter(folder: Path | None = None) -> Path | None:
    """Makes the project in a folder known to this process, and to those that it starts.

    Its modules are imported from there, even where another copy is installed.

    Args:
        folder: where its ``pyproject.toml`` is; by default the current folder.

    Returns:
        The folder; ``None`` where there is no project.

    Raises:
        DiscoveryError: ``pyproject.toml`` cannot be read.
        PluginError: operators were in use before, and its plugin cannot be added to theirs.

    Example::

        if (folder := enter()) is not None:
            print(roots(folder))
    """
    folder = (folder or Path.cwd()).resolve()
    named = _entry_points(folder / "pyproject.toml")
    if not named:
        return None
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    installed = importlib.metadata.entry_points(group=hookspecs.PROJECT)
    known = {(one.name, one.value) for one in installed}
    if missing := {name: value for name, value in named.items() if (name, value) not in known}:
        sys.path.append(_described(missing))
        importlib.invalidate_caches()
        if is_made():  # and asks for installed packages no more
            _add(missing)
    return folder


def _add(entry_points: dict[str, str]) -> None:
    """Adds plugins to those that are asked already."""
    for name, value in entry_points.items():
        try:
            plugin = importlib.import_module(value)
        except Exception as error:  # a plugin's module may raise anything
            raise PluginError(f"plugin {name!r} ({value}) failed to import: {error!r}") from error
        registry().plugins.add(plugin, name)
    registry().rescan()


def roots(folder: Path) -> tuple[Path, ...]:
    """Returns the folders of operators that a project's plugins name.

    Raises:
        PluginError: a plugin of the project cannot be used.
        DiscoveryError: they name none in the project.
    """
    for name, value in _entry_points(folder / "pyproject.toml").items():
        if problem := registry().plugins.problems.get(name):
            raise PluginError(f"{folder / 'pyproject.toml'}, {name} = {value!r}: {problem}")
    found = [root for root in registry().plugins.roots() if root != BUILTIN_ROOT.resolve()]
    own = tuple(root for root in registry().roots_in(folder) if root in found)
    if not own:
        raise DiscoveryError(
            f"{folder / 'pyproject.toml'}: expected cuda_ops_roots of its plugin to name a folder "
            f"in {folder}, got {', '.join(map(str, found)) or 'none'}"
        )
    return own


def operators(folder: Path) -> list[str]:
    """Returns the keys of a project's pairs, and of the files in its roots that form none.

    Raises:
        PluginError, DiscoveryError: see :func:`roots`; or there is no operator yet.
    """
    own = roots(folder)
    keys = [key for key, pair in registry().rescan().items() if pair.root in own]
    keys += [one.name for one in registry().problems if any(str(r) in one.text for r in own)]
    if not keys:
        raise DiscoveryError(
            f"{own[0]}: expected an operator, got none; python -m cuda_ops new my_op writes one"
        )
    return list(dict.fromkeys(keys))


def _entry_points(file: Path) -> dict[str, str]:
    """Returns the entry points of a ``pyproject.toml`` that cuda_ops reads, by name."""
    if not file.is_file():
        return {}
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        read: dict[str, Any] = toml.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DiscoveryError(f"{file}: cannot be read: {error}") from error
    named: Any = read
    for part in ("project", "entry-points", hookspecs.PROJECT):
        named = named.get(part, {})
        if not isinstance(named, dict):
            raise DiscoveryError(
                f"{file}, {part}: expected a table, as in [project.entry-points."
                f"{hookspecs.PROJECT}], got {named!r}"
            )
    return {str(name): str(value) for name, value in named.items()}


def _described(entry_points: dict[str, str]) -> str:
    """Returns a folder that says of a package what an install would; it goes with the process."""
    folder = tempfile.mkdtemp(prefix="cuda_ops-project-")
    atexit.register(_remove, folder, os.getpid())
    name = next(iter(entry_points))
    info = Path(folder) / f"{name}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(_METADATA.format(name=name), encoding="utf-8")
    lines = [f"[{hookspecs.PROJECT}]", *(f"{name} = {at}" for name, at in entry_points.items())]
    (info / "INSTALLER").write_text(INSTALLER, encoding="utf-8")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in a copy of it
        shutil.rmtree(folder, ignore_errors=True)
