"""Choices on disk: one file of JSON for each operator, in the folder ``tuned`` of the cache.

A choice is used only where everything that it was measured with is the same: the text of the
kernel, the compilers and flags, the GPU, its driver, the dtype and the sizes. So a reload of an
edited kernel finds none, and going back to the earlier text finds the earlier choice.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from cuda_ops.build import cache
from cuda_ops.errors import BuildError

#: The form of the file.
FORMAT = 1
FOLDER = "tuned"
#: The candidate that sets no knob.
DEFAULT = "default"
#: The most choices of an operator; what was chosen longest ago goes first.
_MOST = 256
#: Longer than any write takes; a holder that hangs must not stop others for good.
_LOCK_SECONDS = 10.0


@dataclass(frozen=True)
class Key:
    """What a choice was measured with."""

    #: The operator's key, ``"sum_rows"``.
    op: str
    #: The hash of the sources' text, and of compilers (the toolkit's release among them) and flags.
    source: str
    build: str
    #: ``"NVIDIA H200"``, and the version of its driver; of a CPU the model, and nothing.
    device: str
    driver: str
    #: ``"float32"``.
    dtype: str
    #: The bits of rows and columns, see :func:`cuda_ops.runtime.tuning.knobs.size_bits`.
    bits: tuple[int, int]


@dataclass(frozen=True)
class Stored:
    """A choice, and why it was made."""

    key: Key
    #: The candidate's name; ``"default"`` where nothing was better beyond noise.
    name: str
    settings: Mapping[str, int]
    reason: str
    #: By candidate, its time over the default's: median, and the ends of the interval.
    ratios: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)


def path_of(op: str) -> Path:
    """Returns where the choices of an operator are."""
    return cache.cache_dir() / FOLDER / f"{op.replace('::', '.')}.json"


def stored(op: str) -> list[Stored]:
    """Reads the choices of an operator. A file that is damaged, of another version or another
    user's is left out with a warning.

    Example:
    >>> stored("never_tuned")
    []
    """
    path = path_of(op)
    try:
        if not path.exists():
            return []
        cache.check(path)
        return _parsed(path.read_text(encoding="utf-8"), op)
    except (OSError, ValueError, BuildError) as error:
        text = f"{path}: expected choices for {op}, and left out: {error}"
        warnings.warn(text, stacklevel=2)
        return []


def keep(choice: Stored) -> None:
    """Writes a choice, in place of one for the same key; safe with several processes.

    Raises:
        BuildError: the cache cannot be written, or others may write it.
    """
    with _changing(choice.key.op) as found:
        found[:] = [*(one for one in found if one.key != choice.key), choice][-_MOST:]


def forget(op: str) -> int:
    """Removes the choices of an operator; returns how many there were.

    Example:
    >>> forget("never_tuned")
    0
    """
    if not path_of(op).exists():
        return 0
    with _changing(op) as found:
        count = len(found)
        found.clear()
    return count


def operators() -> list[str]:
    """Lists the operators that have a file of choices, by key."""
    folder = cache.cache_dir() / FOLDER
    names = (path.stem for path in folder.glob("[!.]*.json"))
    return sorted(name.replace(".", "::") for name in names)


@contextlib.contextmanager
def _changing(op: str) -> Iterator[list[Stored]]:
    cache.folder(FOLDER)
    path = path_of(op)
    try:
        with FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            found = stored(op)
            yield found
            if found:
                text = {"format": FORMAT, "choices": [asdict(one) for one in found]}
                cache.write(path, json.dumps(text, indent=1) + "\n")
            else:
                path.unlink(missing_ok=True)
    except OSError as error:  # filelock's Timeout is one
        raise BuildError(f"{path}: cannot be written: {error}") from error


_NAME = re.compile(r"\w+(::\w+)?")


def _parsed(text: str, op: str) -> list[Stored]:
    """Raises ValueError for what is not in the form that this module writes."""
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    try:
        choices = [_choice(one) for one in found["choices"]]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if any(choice.key.op != op for choice in choices):
        raise ValueError("of another operator")
    return choices


def _choice(one: dict[str, Any]) -> Stored:
    key = dict(one["key"])
    rows, columns = key.pop("bits")
    settings = {str(name): value for name, value in one["settings"].items()}
    numbers = [rows, columns, *settings.values()]
    if any(not isinstance(n, int) or isinstance(n, bool) for n in numbers):
        raise ValueError(f"expected ints, got {numbers}")
    if any(not isinstance(value, str) for value in (*key.values(), one["name"], one["reason"])):
        raise ValueError("expected text in key, name and reason")
    if not _NAME.fullmatch(key["op"]):
        raise ValueError(f"expected an operator, got {key['op']!r}")
    ratios = {str(n): (float(r[0]), float(r[1]), float(r[2])) for n, r in one["ratios"].items()}
    return Stored(Key(**key, bits=(rows, columns)), one["name"], settings, one["reason"], ratios)
