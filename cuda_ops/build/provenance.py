"""What a library was made from: one line behind the last byte of the file.

``pip install`` and the dev build write it. The dev build reads it so as not to compile what pip
has built, and the first use of an operator to find a library of the present text. The loader of
the system ignores the line. It is read without opening the library, since that would run the
initialisers of a file which may be stale or cut short, and keep it for the life of the process.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.build import toolchain
from cuda_ops.build.discovery import Pair, Text

_NO_ARCHS = "none"
_LINE = re.compile(rb"\ncuda_ops ([0-9a-f]+) ([0-9a-f]+) (\S+) ([0-9a-f]{64})\Z")


@dataclass(frozen=True)
class Provenance:
    """Text, compilers and flags, and architectures of a library."""

    #: :attr:`cuda_ops.build.discovery.Text.hash`
    source_hash: str
    #: :func:`cuda_ops.build.toolchain.recipe`
    recipe: str
    #: The GPUs that it holds kernels for; empty where it holds none.
    archs: tuple[str, ...]


def of(pair: Pair, archs: tuple[str, ...], text: Text | None = None) -> Provenance:
    """Returns what a build makes the pair's library from: ``text``, or its files as they are."""
    text = text or pair.read()
    built_for = archs if toolchain.uses_cuda(pair) else ()
    return Provenance(text.hash, toolchain.recipe(pair, archs), built_for)


def write(library: Path, provenance: Provenance) -> None:
    """Appends the line to a library that was just linked."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    archs = ";".join(provenance.archs) or _NO_ARCHS
    with library.open("ab") as file:
        file.write(
            f"\ncuda_ops {provenance.source_hash} {provenance.recipe} {archs} {digest}".encode()
        )


def read(contents: bytes) -> Provenance | None:
    """Reads the line of a library; ``None`` if it has none or the file is damaged."""
    line = _LINE.search(contents, max(0, len(contents) - 1024))
    if line is None:
        return None
    source_hash, recipe, archs, digest = (field.decode() for field in line.groups())
    if hashlib.sha256(contents[: line.start()]).hexdigest() != digest:
        return None
    listed = () if archs == _NO_ARCHS else tuple(archs.split(";"))
    return Provenance(source_hash, recipe, listed)
