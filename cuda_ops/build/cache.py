"""The folder of builds. Libraries in it are run, so nobody else may write it; it has a bound."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cuda_ops.build.discovery import survey
from cuda_ops.errors import BuildError

#: The most bytes that libraries and builds take; what was used longest ago goes first.
BOUND = 4 << 30
#: What was used so many seconds ago is in use.
_IN_USE = 3600


def cache_dir() -> Path:
    """Returns ``$CUDA_OPS_CACHE``, ``$XDG_CACHE_HOME/cuda_ops`` or ``~/.cache/cuda_ops``.

    Raises:
        BuildError: there is no home folder.
    """
    try:
        if chosen := os.environ.get("CUDA_OPS_CACHE"):
            return Path(chosen).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuda_ops"
    except RuntimeError as error:  # there is no home folder
        raise BuildError(f"no folder to build in: {error} Set CUDA_OPS_CACHE to one.") from error


def folder(*names: str) -> Path:
    """Returns a folder of the cache, which it makes for this user alone.

    Raises:
        BuildError: see :func:`check`.
        OSError: it cannot be made.
    """
    path = cache_dir()
    for name in ("", *names):
        path /= name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        if found.st_uid not in (0, os.geteuid()):
            raise BuildError(
                f"{part}: a cache holds code: expected user {os.geteuid()} or root to own it, got "
                f"user {found.st_uid}; run rm -r {part}, or set CUDA_OPS_CACHE to another folder"
            )
        # In a sticky folder, such as /tmp, others cannot replace what they do not own.
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            raise BuildError(
                f"{part}: a cache holds code: expected only its owner to write it, got mode "
                f"{stat.S_IMODE(found.st_mode):o}; run chmod -R go-w {top}, or rm -r {top} if "
                "another user may have written it"
            )
        if part == top:
            return


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file of the cache holds; an empty one if it holds none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def root_key(root: Path) -> str:
    """Returns the hex digest that stands for a root in the names of its libraries."""
    return hashlib.sha256(str(root).encode()).hexdigest()[:8]


def remember_root(root: Path) -> None:
    """Notes where the sources of a build are, so that :func:`clean` finds them."""
    note = folder("roots") / root_key(root)
    if not note.exists():
        note.write_text(str(root))


@dataclass(frozen=True)
class Entry:
    """A library with the files beside it, or the folder of a build."""

    name: str
    paths: tuple[Path, ...]
    size: int
    #: When it was built, or asked for.
    used: float

    def remove(self) -> bool:
        """Deletes it unless a build is going on in it; says whether it did."""
        if self.paths[0].parent.name != "work":
            for path in self.paths:
                path.unlink(missing_ok=True)
            return True
        try:
            with FileLock(self.paths[0].with_suffix(".lock"), timeout=0):
                shutil.rmtree(self.paths[0], ignore_errors=True)
        except Timeout:
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

    Raises:
        BuildError: see :func:`check`; a folder that others made could lead anywhere.
    """
    for name in ("roots", "lib", "work"):
        folder(name)
    texts: dict[tuple[str, str], str] = {}  # of present pairs, by root and stem
    for note in (cache_dir() / "roots").glob("*"):
        pairs, _ = survey([Path(note.read_text())])
        if not pairs:
            note.unlink()
        for stem, pair in pairs.items():
            texts[note.name, stem] = pair.read().hash
    removed: list[Entry] = []
    kept: list[Entry] = []
    for entry in _entries():
        stem, *text, place = entry.name.split("-")
        present = texts.get((place[-24:-16], stem))
        needed = present is not None and text in ([], [present])
        (removed if not needed and entry.remove() else kept).append(entry)
    return removed, kept


def _entries() -> Iterator[Entry]:
    files: dict[str, list[Path]] = {}
    for path in (cache_dir() / "lib").glob("*"):
        # One whose name starts with a dot was left by a process that was killed.
        files.setdefault(path.name.lstrip(".").partition(".")[0], []).append(path)
    for path in (cache_dir() / "work").glob("*"):
        if path.is_dir():
            files[path.name] = [path]
    for name, paths in files.items():
        found = [status for path in paths for status in _statuses(path)]
        used = max((max(status.st_atime, status.st_mtime) for status in found), default=0.0)
        yield Entry(name, tuple(paths), sum(status.st_size for status in found), used)


def _statuses(path: Path) -> Iterator[os.stat_result]:
    for one in (path, *path.glob("*")):
        try:
            yield one.stat()
        except FileNotFoundError:  # another process is at work
            continue
