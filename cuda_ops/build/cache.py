"""The cache of builds, of bounded size. Its libraries are run, so only its owner may write it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from cuda_ops.build import commands
from cuda_ops.build.discovery import Pair, Text, survey
from cuda_ops.build.source_text import Kind
from cuda_ops.errors import BuildError

#: The most bytes that libraries and builds take; what was used longest ago goes first.
BOUND = 4 << 30
#: An entry used within so many seconds counts as in use.
_IN_USE = 3600

#: Where the operators are that are written as strings: ``<process>/<namespace>``, each one a root.
INLINE = "inline"

#: Lies in a build folder while compilers run.
MARKER = "building"
_ABANDONED = ".abandoned-"
_NAME = re.compile(
    r"\.?(?P<stem>\w+)(-(?P<text>[0-9a-f]{16}))?"
    r"-(?P<abi>(torch\w+_)?)(?P<root>[0-9a-f]{8})(?P<key>[0-9a-f]{16})(?P<debug>-debug)?(\..+)?"
)


# --- files and folders -------------------------------------------------------------


def cache_dir() -> Path:
    """Returns ``$CUDA_OPS_CACHE``, ``$XDG_CACHE_HOME/cuda_ops`` or ``~/.cache/cuda_ops``.

    Raises:
        BuildError: there is no home folder, or no user of that name.
    """
    chosen = os.environ.get("CUDA_OPS_CACHE")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuda_ops"
    except RuntimeError as error:
        if chosen:
            missing = "home folder" if Path(chosen).parts[0] == "~" else "such user"
            raise BuildError(
                f"CUDA_OPS_CACHE: expected a folder, got {chosen!r}: there is no {missing}"
            ) from error
        raise BuildError(f"no folder to build in: {error} Set CUDA_OPS_CACHE to one.") from error


def folder(*names: str) -> Path:
    """Returns a folder of the cache, which it makes for this user alone.

    Raises:
        BuildError: it cannot be made; see also :func:`check`.
    """
    path = cache_dir()
    for name in ("", *names):
        path /= name
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(
                f"CUDA_OPS_CACHE: expected a folder that can be written, got {path}: "
                f"{error.strerror}"
            ) from error
    check(path)
    return path


def check(path: Path) -> None:
    """Refuses a file or folder of the cache that another user could have written or replaced.

    Raises:
        BuildError: it, or a folder from it up to the cache, belongs to another user, or others may
            write it.
    """
    top = cache_dir()
    for part in (path, *path.parents):
        found = part.stat()
        if not _is_own(found):
            raise BuildError(
                f"{part}: a cache holds code: expected user {os.geteuid()} or root to own it, got "
                f"user {found.st_uid}; run rm -r {shlex.quote(str(part))}, or set CUDA_OPS_CACHE "
                "to another folder"
            )
        # In a sticky folder, such as /tmp, others cannot replace what they do not own.
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            mend = shlex.quote(str(top))
            raise BuildError(
                f"{part}: a cache holds code: expected only its owner to write it, got mode "
                f"{stat.S_IMODE(found.st_mode):o}; run chmod -R go-w {mend}, or rm -r {mend} if "
                "another user may have written it"
            )
        if part == top:
            return


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def write(path: Path, contents: str | bytes, mode: int | None = 0o644) -> None:
    """Writes, flushes and renames: after a crash the name leads to a whole file or to none.

    Follows a link, and writes directly to what is a pipe or a device. Without ``mode``, the umask
    decides.

    Raises:
        OSError: it cannot be written; ``filename`` is the path that was given.
    """
    data = contents.encode() if isinstance(contents, str) else contents
    try:
        if is_stream(path):
            path.write_bytes(data)
        else:
            _write_whole(Path(os.path.realpath(path)), data, mode)
    except OSError as error:  # on a full disk it names no file, elsewhere the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_stream(path: Path) -> bool:
    """Tells whether a path leads to what a rename would destroy, such as a pipe or a device."""
    return path.exists() and not path.is_file()


def _write_whole(path: Path, data: bytes, mode: int | None) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file of the cache holds; an empty one if it holds none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def usable(work: Path) -> Path:
    """Returns a build folder; empties it if a build was killed there or another user owns a file.

    Its files may have any mode, as the umask decides: the folder is this user's alone.
    """
    killed = (work / MARKER).exists()
    if killed or not all(_is_own(path.lstat()) for path in work.rglob("*")):
        # The compilers of a killed build may still be writing: they keep the old folder.
        abandoned = work.with_name(f"{work.name}{_ABANDONED}{uuid.uuid4().hex[:8]}")
        work.rename(abandoned)
        shutil.rmtree(abandoned, ignore_errors=True)
        work.mkdir(mode=0o700)
    return work


# --- names -------------------------------------------------------------------------


@dataclass(frozen=True)
class Name:
    """How the files of a build are called: ``<stem>-<text>-<abi><root><key>`` with a suffix, which
    ``-debug`` precedes in those of a debug build.
    """

    stem: str
    #: :attr:`Text.hash`; the folder that a library is built in has none.
    text: str
    #: The torch and Python that a guest's library fits; a native one fits all: empty.
    abi: str
    #: A hash of the root's path.
    root: str
    #: A hash of flags, compilers and torch's CUDA.
    key: str
    #: ``-debug``, or nothing: a debug build is told apart without being read.
    debug: str = ""

    @classmethod
    def of(cls, pair: Pair, archs: tuple[str, ...], text: str, debug: bool = False) -> Name:
        """Returns the name of a text's library, or of its debug build."""
        recipe = commands.recipe(pair, archs, debug)
        key = _digest(f"{recipe}\0{torch.version.cuda}".encode(), 16)
        return cls(pair.stem, text, _abi(pair), _root_key(pair.root), key, "-debug" * debug)

    @classmethod
    def parse(cls, file: str) -> Name | None:
        """Returns what a file of the cache is; ``None`` if it is something else."""
        found = _NAME.fullmatch(file)
        return None if found is None else cls(**found.groupdict(default=""))

    @property
    def folder(self) -> str:
        """The name of the folder that every text is built in."""
        return f"{self.stem}-{self.abi}{self.root}{self.key}{self.debug}"

    @property
    def lock(self) -> Path:
        """The lock of that folder. It stays, since another process may be about to take it."""
        return cache_dir() / "work" / f"{self.folder}.lock"

    @property
    def library(self) -> Path:
        """Where the library is published; the files beside it differ in the suffix."""
        name = f"{self.stem}-{self.text}-{self.abi}{self.root}{self.key}{self.debug}.so"
        return cache_dir() / "lib" / name


def newest_first(pair: Pair, text: Text, suffix: str, debug: bool = False) -> list[Path]:
    """Lists the published files of a text that fit this torch and Python: those of debug builds, or
    of all others.
    """
    with contextlib.suppress(OSError, BuildError):  # BuildError: there is no home folder
        found = (cache_dir() / "lib").glob(f"{pair.stem}-{text.hash}-{_abi(pair)}*{suffix}")
        fitting = (path for path in found if is_debug(path) == debug)
        return sorted(fitting, key=lambda path: -path.stat().st_mtime)
    return []


def is_debug(library: Path | None) -> bool:
    """Says whether a library is a debug build."""
    name = None if library is None else Name.parse(library.name)
    return name is not None and bool(name.debug)


def source_hash(library: Path) -> str:
    """Returns the hash of the text that a library of the cache was made from; else nothing."""
    name = Name.parse(library.name)
    return "" if name is None else name.text


def remember_root(root: Path) -> None:
    """Notes where the sources of a build are, so that :func:`clean` finds them."""
    note = folder("roots") / _root_key(root)
    shared = os.fsencode(_shared(root))
    if not note.exists() or note.read_bytes() != shared:
        write(note, shared)


def _abi(pair: Pair) -> str:
    if pair.kind is Kind.NATIVE:
        return ""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return re.sub(r"\W", "_", f"torch{torch.__version__}_{python}_")


def _root_key(root: Path) -> str:
    return _digest(os.fsencode(_shared(root)), 8)


def _shared(root: Path) -> Path:
    """Returns the folder that a root's builds go by: all processes build inline operators as one,
    so that the next takes what the first has built of the same text.
    """
    inline = cache_dir() / INLINE
    return inline if root.parent.parent == inline.resolve() else root


def _digest(contents: bytes, length: int) -> str:
    return hashlib.sha256(contents).hexdigest()[:length]


# --- what it gives up --------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A library with the files beside it, or the folder of a build."""

    name: Name
    paths: tuple[Path, ...]
    size: int
    #: When it was built, or asked for.
    used: float

    def remove(self) -> bool:
        """Deletes it unless a build is going on in it, or it cannot be; says whether it did."""
        building = FileLock(self.name.lock, timeout=0)
        try:
            with contextlib.nullcontext() if self.name.text else building:
                for path in self.paths:
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)
        except OSError:  # filelock's Timeout is one
            return False
        return True


def prune(bound: int = BOUND) -> None:
    """Brings the cache below its bound."""
    entries = sorted(_entries(), key=lambda entry: entry.used)
    total = sum(entry.size for entry in entries)
    for entry in entries:
        if total <= bound or entry.used > time.time() - _IN_USE:
            return
        if entry.remove():
            total -= entry.size


def clean() -> tuple[list[Entry], list[Entry]]:
    """Removes what no present source needs; returns what it removed and what it kept.

    It keeps what belongs to a root that cannot be read.

    Raises:
        BuildError: see :func:`check`; a folder that others made could lead anywhere.
    """
    for name in ("roots", "lib", "work"):
        folder(name)
    present = _present()
    for name, texts in present.items():
        if texts == {}:
            with contextlib.suppress(OSError):
                (cache_dir() / "roots" / name).unlink()
    removed: list[Entry] = []
    kept: list[Entry] = []
    for entry, needed in _judged(present):
        (removed if not needed and entry.remove() else kept).append(entry)
    return removed, kept


def entries() -> list[tuple[Entry, bool]]:
    """Returns what the cache holds, each with whether a present source may need it; what none
    needs, :func:`clean` would remove.
    """
    return list(_judged(_present()))


def _judged(present: dict[str, dict[str, set[str]] | None]) -> Iterator[tuple[Entry, bool]]:
    for entry in _entries():
        texts = present.get(entry.name.root, {})
        found = {entry.name.text} if texts is None else texts.get(entry.name.stem, set())
        needed = bool(found) and entry.name.text in {"", *found}
        yield entry, needed and _ABANDONED not in entry.paths[0].name


def _present() -> dict[str, dict[str, set[str]] | None]:
    """Returns what :func:`_texts` does for each root that was built here."""
    notes = (cache_dir() / "roots").glob("[!.]*")
    return {note.name: _texts(note) for note in notes}


def _texts(note: Path) -> dict[str, set[str]] | None:
    """Returns the hashes of each pair's texts under a root; ``None`` if it cannot be read. An
    inline operator has one in each process.
    """
    try:
        if not (path := note.read_bytes()):
            return None
        root = Path(os.fsdecode(path))
        texts: dict[str, set[str]] = {}
        for one in root.glob("*/*/") if root == cache_dir() / INLINE else [root]:
            for name in ("bindings", "kernels"):  # an unreadable one is an empty one to survey()
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    next((one / name).iterdir(), None)
            for pair in survey([one])[0].values():
                texts.setdefault(pair.stem, set()).add(pair.read().hash)
        return texts
    except (OSError, ValueError):  # ValueError: the note holds something else
        return None


def _entries() -> Iterator[Entry]:
    found: dict[str, tuple[Name, list[Path]]] = {}
    for path in (cache_dir() / "lib").glob("*"):
        # One whose name starts with a dot was left by a process that was killed.
        if (name := Name.parse(path.name)) is not None:
            found.setdefault(str(name.library), (name, []))[1].append(path)
    for path in (cache_dir() / "work").glob("*"):
        if path.is_dir() and (name := Name.parse(path.name)) is not None:
            found[str(path)] = (name, [path])
    for name, paths in found.values():
        statuses = [status for path in paths for status in _statuses(path)]
        used = max((max(status.st_atime, status.st_mtime) for status in statuses), default=0.0)
        yield Entry(name, tuple(paths), sum(status.st_size for status in statuses), used)


def _statuses(path: Path) -> Iterator[os.stat_result]:
    for one in (path, *path.glob("*")):
        try:
            yield one.stat()
        except FileNotFoundError:  # another process is at work
            continue
