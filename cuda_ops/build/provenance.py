"""What a release library was made from: one line behind the last byte of the file.

``pip install`` writes it and the dev build reads it, so that neither compiles what the other has.
The loader of the system ignores the line. It is read without opening the library: that would run
the initialisers of a file which may be stale or cut short, and keep it for the life of the process.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.build import toolchain
from cuda_ops.build.discovery import Pair

_LINE = re.compile(rb"\ncuda_ops ([0-9a-f]+) ([0-9a-f]+) (\S+) ([0-9a-f]{64})\Z")


@dataclass(frozen=True)
class Provenance:
    """Text, compilers and flags, and architectures of a library."""

    #: :meth:`cuda_ops.build.discovery.Pair.source_hash`
    source_hash: str
    #: :func:`cuda_ops.build.toolchain.recipe`
    recipe: str
    archs: tuple[str, ...]


def of(pair: Pair, archs: tuple[str, ...]) -> Provenance:
    """What a build would make the pair's library from now."""
    return Provenance(pair.source_hash(), toolchain.recipe(pair, archs), archs)


def write(library: Path, provenance: Provenance) -> None:
    """Append the line to a library that was just linked."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    archs = ";".join(provenance.archs)
    with library.open("ab") as file:
        file.write(
            f"\ncuda_ops {provenance.source_hash} {provenance.recipe} {archs} {digest}".encode()
        )


def read(contents: bytes) -> Provenance | None:
    """The line of a library, or ``None``: it has none, or is not whole as it was linked."""
    line = _LINE.search(contents, max(0, len(contents) - 1024))
    if line is None:
        return None
    source_hash, recipe, archs, digest = (field.decode() for field in line.groups())
    if hashlib.sha256(contents[: line.start()]).hexdigest() != digest:
        return None
    return Provenance(source_hash, recipe, tuple(archs.split(";")))
