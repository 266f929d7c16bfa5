"""What a library was made from: one line behind the last byte of the file.

``pip install`` and the dev build write it. The dev build reads it so as not to compile what pip
has built, and the first use of an operator to find a library of the present text. The loader of
the system ignores the line. It is read without opening the library, since that would run the
initialisers of a file which may be stale, and keep it for the life of the process. A file that was
cut short would end the process there: the system kills what reads beyond the end of a mapped file.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cuda_ops.build import toolchain
from cuda_ops.build.discovery import Pair, Text
from cuda_ops.errors import BuildError

_NO_ARCHS = "none"
#: Hashing so much takes 10 ms. Of a larger library the first use checks the length alone.
_HASHED = 16 << 20
_LINE = re.compile(rb"\ncuda_ops ([0-9a-f]+) ([0-9a-f-]+) (\S+) ([0-9a-f]{64})\Z")


@dataclass(frozen=True)
class Provenance:
    """Text, compilers and flags, and architectures of a library."""

    #: :attr:`cuda_ops.build.discovery.Text.hash`
    source_hash: str
    #: :func:`cuda_ops.build.toolchain.recipe`
    recipe: str
    #: The GPUs that it holds kernels for; empty where it holds none.
    archs: tuple[str, ...]

    @property
    def environment(self) -> str:
        """:func:`cuda_ops.build.toolchain.environment`."""
        return "".join(self.recipe.partition("-")[1:])


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


class DamagedError(BuildError):
    """A file that is no whole library, so that opening it could end the process."""


def read(library: Path, *, hashed: int = _HASHED) -> Provenance | None:
    """Reads the line of a library; ``None`` if it has none: a guest's, or one that was stripped.

    Args:
        library: the file.
        hashed: up to how many bytes a library is compared with its checksum.

    Raises:
        DamagedError: it was cut short, or is not what was linked.
        OSError: it cannot be read.
    """
    if library.is_dir():
        raise DamagedError(f"{library}: expected a library, got a folder")
    with library.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        linked = _linked_size(file, size)
        if linked > size:
            raise DamagedError(f"{library}: expected at least {linked} bytes, got {size}")
        file.seek(max(0, size - 1024))
        line = _LINE.search(file.read())
        if line is None:
            return None
        source_hash, recipe, archs, digest = (field.decode() for field in line.groups())
        if size <= hashed:
            file.seek(0)
            found = hashlib.sha256(file.read(size - len(line[0]))).hexdigest()
            if found != digest:
                raise DamagedError(f"{library}: expected SHA-256 {digest}, got {found}")
    listed = () if archs == _NO_ARCHS else tuple(archs.split(";"))
    return Provenance(source_hash, recipe, listed)


def _linked_size(file: BinaryIO, size: int) -> int:
    """Returns where the section headers of an ELF file end: linkers write them last."""
    header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        raise DamagedError(f"{file.name}: expected an ELF library, got {size} other bytes")
    if header[4:6] != b"\x02\x01":  # 64 bits, little endian
        return 0
    (start,) = struct.unpack_from("<Q", header, 40)
    entry_size, entries = struct.unpack_from("<HH", header, 58)
    return int(start + entry_size * entries)
