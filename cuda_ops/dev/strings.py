"""Operators whose files are strings: of a program, or of a notebook's cell."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import linecache
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from cuda_ops.build import cache, origins
from cuda_ops.build.advice import dev_command
from cuda_ops.build.discovery import illegal_name, namespace_of
from cuda_ops.build.origins import Origin
from cuda_ops.build.source_text import namespace_in
from cuda_ops.compile_ops import Row, compile_ops
from cuda_ops.errors import BuildError, DiscoveryError, ResultError
from cuda_ops.names import HOME, fault_of_namespace, keyed
from cuda_ops.registry import registry

#: The parts of an operator: folder and suffix of each file, and what begins a comment in it.
PARTS = {
    "cpp": ("bindings", ".cpp", "//"),
    "cu": ("kernels", ".cu", "//"),
    "plugin": ("ops", ".py", "#"),
}
_SEAL = "Kept by cuda_ops.inline, which replaces the text above unless it was edited:"

_lock = threading.RLock()


@dataclass(frozen=True)
class Source:
    """The text of a part, and where it was written."""

    text: str
    origin: Origin


def inline(
    name: str,
    cpp: str = "",
    cu: str = "",
    *,
    plugin: str = "",
    root: str | os.PathLike[str] | None = None,
) -> Any:
    """Builds an operator whose files are strings, loads it and compares it with its reference.

    The strings are what ``bindings/<name>.cpp`` and ``kernels/<name>.cu`` would hold, and the
    operator gets all that one of files gets. Called again with another text, it is built anew and
    functions obtained earlier run the new code; with the same text nothing is built. Where a text
    does not build, the one before goes on serving.

    Args:
        name: the operator's name, as a file would have it.
        cpp: the binding, ``CUDA_OPS(library) { ... }``; or a guest, as in PyTorch's tutorials.
        cu: the kernel. Without ``cpp`` it registers itself (``PYBIND11_MODULE`` or
            ``TORCH_LIBRARY``).
        plugin: Python text with hooks of the operator, such as ``cuda_ops_reference``.
        root: a folder to keep the files in, as ``compile_dev.py --root`` takes it. By default they
            are in the cache, in a folder that this process has for itself.

    Returns:
        The public function, which is ``cuda_ops.<name>`` too; a guest's module.

    Raises:
        DiscoveryError: the name cannot be used or is taken, the text registers nothing, or ``root``
            has a file of that name that is not from here.
        BuildError: it does not compile. Lines are those of the cell or the file that calls this,
            where the string stands there as it is, and of the string elsewhere.
        ManifestError: the text contradicts itself.
        PluginError: the plugin cannot be used.
        ResultError: a result is wrong; the operator is loaded all the same.

    Example::

        swish = cuda_ops.inline("swish", cpp=r'''
        #include "binding.h"
        using namespace cuda_ops;
        Tensor swish_cpu(const Tensor& x) {
          return elementwise_cpu([](double v) { return v / (1 + exp(-v)); }, x);
        }
        CUDA_OPS(library) {
          library.op("swish(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<swish_cpu>();
        }
        ''')
        swish(torch.ones(3))
    """
    parts = {"cpp": cpp, "cu": cu, "plugin": plugin}
    given: dict[str, object] = {"name": name, **parts}
    for argument, value in given.items():
        if not isinstance(value, str):
            got = type(value).__name__
            raise TypeError(f"inline: argument {argument!r}: expected str, got {got}")
    caller = sys._getframe(1)
    sources = {
        part: Source(text, _origin(text, caller) or Origin(f"<{name}{PARTS[part][1]}>"))
        for part, text in parts.items()
        if text
    }
    rows = define(name, sources, None if root is None else Path(root))
    key = rows[0].op
    raise_first(rows)
    return registry().public(key)


def define(
    name: str,
    sources: Mapping[str, Source],
    root: Path | None = None,
    *,
    compare: bool = True,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Writes the parts of an operator and builds it; returns its row, then those of others that
    were built with it.

    Raises:
        DiscoveryError: see :func:`inline`; nothing is written then.
        BuildError: the files cannot be written.
    """
    with _lock:
        namespace = _checked(name, sources)
        folder = _own_folder() / namespace if root is None else root.expanduser().resolve()
        key = keyed(namespace_of(folder) or namespace if root is not None else namespace, name)
        _refuse_taken(key, name, folder)
        files = _files_of(folder, name, sources, kept=root is not None)
        if root is not None:
            for path in files:
                _refuse_foreign(path)
            if key in _own:  # it moves to a folder that is kept
                _write(_files_of(_own_root(key), name, {}, kept=False))
                del _own[key]
        _write(files)
        _remember(files, sources)
        if root is None:
            _own[key] = (name, namespace, dict(sources))
        registry().add_root(folder)
        rows = compile_ops([key], compare=compare, progress=progress)
        for row in rows:
            row.error = _told(key, row.error)
        return sorted(rows, key=lambda row: (row.op != key, row.op))


def raise_first(rows: list[Row]) -> None:
    """Raises the error of the first row that has one.

    Raises:
        CudaOpsError: of the class that it failed with.
    """
    for row in rows:
        if row.error:
            failure = registry().failures.get(row.op)
            kind = ResultError if failure is None else type(failure)
            raise kind(row.error) from None


def _told(key: str, error: str) -> str:
    """Returns a message for a reader that has no files, and no command that knows of them."""
    command = f"{dev_command()} --check {key} says"
    return origins.shown(error).replace(command, f"cuda_ops.testing.check_op({key!r}) says")


# --- what may be written -------------------------------------------------------------


def _checked(name: str, sources: Mapping[str, Source]) -> str:
    """Returns the namespace that the text names.

    Raises:
        DiscoveryError: neither it nor the name can be used.
    """
    if problem := illegal_name(name, "choose another"):
        raise DiscoveryError(f"inline: {problem}")
    if not {"cpp", "cu"} & sources.keys():
        raise DiscoveryError(
            f"inline: {name}: expected a binding (cpp), a kernel (cu) or both, got neither"
        )
    spaces = [namespace_in(sources[part].text) for part in ("cpp", "cu") if part in sources]
    namespace = next(filter(None, spaces), HOME)
    if namespace != HOME and (fault := fault_of_namespace(namespace)):
        raise DiscoveryError(f"inline: {name}: {fault}; choose another")
    return namespace


def _refuse_taken(key: str, name: str, folder: Path) -> None:
    pairs = registry().rescan()
    first = pairs.get(key)
    own = key in _own and first is not None and first.root == _own_root(key)
    if first is not None and first.root != folder.resolve() and not own:
        where = first.root
        kept = any(_is_sealed(path) for path in first.sources)
        raise DiscoveryError(
            f"inline: operator {key!r} is already defined by {first.sources[0]}; "
            + (
                f"pass root={str(where)!r}, or choose another name"
                if kept
                else "choose another name"
            )
        )
    owner = key.removesuffix("_backward")
    if owner != key and owner in pairs:
        raise DiscoveryError(f"inline: {key} is the gradient of {owner} and belongs into its text")
    operator = registry().loaded(key)
    if operator is not None and operator.spec.stem != name:
        raise DiscoveryError(
            f"inline: operator {key!r} is already defined by the pair {operator.spec.pair!r}; "
            "choose another name"
        )


def _refuse_foreign(path: Path) -> None:
    """Refuses to replace what its user wrote: a file of another origin, or one that was edited."""
    if path.exists() and not _is_sealed(path):
        raise DiscoveryError(
            f"inline: {path} was not written by cuda_ops.inline, or was edited since; it stays as "
            "it is: move it away, or choose another root or name"
        )


def _is_sealed(path: Path) -> bool:
    """Says whether :func:`define` wrote this kept file, and everything that is in it."""
    try:
        text, seal, digest = path.read_text(encoding="utf-8").rpartition(_SEAL)
    except (OSError, ValueError):
        return False
    text = text[: text.rfind("\n") + 1]  # without the mark of the comment
    return bool(seal) and digest.strip() == _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _files_of(root: Path, name: str, sources: Mapping[str, Source], kept: bool) -> dict[Path, str]:
    """Returns each file that the operator may have, with its text; empty where it has none."""
    return {
        root / place / f"{name}{suffix}": _text(sources.get(part), mark, kept)
        for part, (place, suffix, mark) in PARTS.items()
    }


def _remember(files: Mapping[Path, str], sources: Mapping[str, Source]) -> None:
    for part, path in zip(PARTS, files, strict=True):
        if part in sources:
            origins.remember(path, sources[part].origin)
        else:
            origins.forget(path)


def _text(source: Source | None, mark: str, kept: bool) -> str:
    """Returns what a file is to hold: its text first, so that its lines are those of the file."""
    if source is None:
        return ""
    text = source.text if source.text.endswith("\n") else f"{source.text}\n"
    return f"{text}{mark} {_SEAL} {_digest(text)}\n" if kept else text


def _write(files: Mapping[Path, str]) -> None:
    """Writes the files whose text is new, and removes those without a text."""
    path = next(iter(files))
    try:
        for path, text in files.items():
            if not text:
                path.unlink(missing_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            # Untouched files keep their time, and ninja their objects.
            if not (path.is_file() and path.read_bytes() == text.encode()):
                cache.write(path, text)
    except OSError as error:
        raise BuildError(f"inline: cannot write {path}: {error.strerror}") from error


# --- this process's folder -----------------------------------------------------------


@dataclass(frozen=True)
class _Home:
    """A folder in the cache, and the lock that keeps other processes from taking it."""

    folder: Path
    lock: int
    process: int

    @property
    def held(self) -> bool:
        """Whether it is this process's: not that of the one which it was forked from, nor removed
        together with the cache.
        """
        with contextlib.suppress(FileNotFoundError):
            known, present = os.fstat(self.lock), self.folder.with_suffix(".lock").stat()
            here = self.process == os.getpid() and self.folder.is_dir()
            return here and os.path.samestat(known, present)
        return False


_home: _Home | None = None
#: The operators in it by key: name, namespace and parts.
_own: dict[str, tuple[str, str, dict[str, Source]]] = {}


def _own_folder() -> Path:
    """Returns the folder of this process, with a root for each namespace."""
    global _home
    if _home is not None and _home.held:
        return _home.folder
    before, _home = _home, _taken_folder()
    for name, namespace, sources in _own.values():
        root = _home.folder / namespace
        files = _files_of(root, name, sources, kept=False)
        _write(files)
        _remember(files, sources)
        if before is not None:
            registry().drop_root(before.folder / namespace)
        registry().add_root(root)
    return _home.folder


def _taken_folder() -> _Home:
    """Takes the first folder that no other process has, and empties it.

    The next session gets the same one, and finds libraries and objects of the texts that it has in
    common with the last. The lock ends with the process: no ``FileLock``, which a forked process
    would release.
    """
    folders = cache.folder(cache.INLINE)
    for number in itertools.count():
        folder = folders / str(number)
        try:
            lock = os.open(folder.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
        except OSError as error:
            raise BuildError(
                f"inline: cannot write in {folders}: {error.strerror}; set CUDA_OPS_CACHE to a "
                "folder that can be written"
            ) from error
        return _Home(cache.folder(cache.INLINE, str(number)).resolve(), lock, os.getpid())
    raise AssertionError("numbers do not end")


def _own_root(key: str) -> Path:
    """Returns the root of an operator of :data:`_own`."""
    return _own_folder() / _own[key][1]


# --- where a string was written ------------------------------------------------------


def _origin(text: str, caller: FrameType) -> Origin | None:
    """Finds a string in the file or cell of the caller; ``None`` where it does not stand there as
    it is, indentation aside, or stands there more than once.
    """
    file = caller.f_code.co_filename
    lines = [line.strip() for line in linecache.getlines(file, caller.f_globals)]
    wanted = [line.strip() for line in text.splitlines()]
    blank = next((i for i, line in enumerate(wanted) if line), 0)
    wanted = "\n".join(wanted).strip().split("\n")
    # A quote may stand before the first line and behind the last one.
    found = [
        start
        for start in range(len(lines) - len(wanted) + 1)
        if lines[start].endswith(wanted[0]) or (len(wanted) == 1 and wanted[0] in lines[start])
        if lines[start + 1 : start + len(wanted) - 1] == wanted[1:-1]
        if len(wanted) == 1 or lines[start + len(wanted) - 1].startswith(wanted[-1])
    ]
    return Origin(cell_of(file) or file, found[0] + 1 - blank) if len(found) == 1 else None


def cell_of(file: str) -> str:
    """Returns how IPython calls the cell in this file, ``In[3]``; empty where it is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # Not its execution_count: some versions count before they run a cell, others after.
    name = None if shell is None else shell.compile.format_code_name(file)
    return "" if name is None else str(name[1])
