"""The cache of builds, as it lies there: nothing in it is opened, made or removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cuda_ops.build import cache
from cuda_ops.doctor.facts import Cache
from cuda_ops.errors import BuildError


def look() -> Cache:
    """Returns what the cache holds, and what a build would refuse of it."""
    try:
        path = cache.cache_dir()
    except BuildError as error:
        return Cache(problem=str(error), writable=False)
    if path.exists() and not path.is_dir():
        problem = f"CUDA_OPS_CACHE: expected a folder that can be written, got {path}: a file"
        return Cache(str(path), problem=problem, writable=False)
    if not path.exists():
        return Cache(str(path), writable=_may_write(path))
    found = cache.entries()
    stale = [entry for entry, needed in found if not needed]
    return Cache(
        str(path),
        size=sum(entry.size for entry, _ in found),
        entries=len(found),
        stale=len(stale),
        stale_size=sum(entry.size for entry in stale),
        foreign=tuple(dict.fromkeys(_foreign(path))),
        writable=_may_write(path),
    )


def _foreign(top: Path) -> Iterator[str]:
    """Yields why each file or folder is refused that others could have written."""
    for path in (top, *top.glob("*"), *top.glob("lib/*"), *top.glob("work/*")):
        try:
            cache.check(path)
        except FileNotFoundError:  # another process is at work
            continue
        except BuildError as error:
            yield str(error)


def _may_write(path: Path) -> bool:
    there = next(part for part in (path, *path.parents) if part.exists())
    return os.access(there, os.W_OK | os.X_OK)
