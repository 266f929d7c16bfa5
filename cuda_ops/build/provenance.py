"""What a library was made from: one line behind the last byte of the file.

``pip install`` and the dev build write it. The dev build reads it so as not to compile what pip
has built, and the first use of an operator to find a library of the present text. The loader of
the system ignores the line. It is read without opening the library, since that would run the
initializers of a file which may be stale, and keep it for the life of the process. A file that was
cut short would end the process there: the system kills what reads beyond the end of a mapped file.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.build import commands
from cuda_ops.build.discovery import Pair, Text
from cuda_ops.errors import BuildError

_NO_ARCHS = "none"
#: The first use of a larger library checks only its length, as hashing it all would be felt.
_HASHED = 16 << 20
#: What is read of a large library, at each end.
_ENDS = 1024
_LINE = re.compile(rb"\ncuda_ops ([0-9a-f]+) (debug-)?([0-9a-f-]+) (\S+) ([0-9a-f]{64})\Z")


@dataclass(frozen=True)
class Provenance:
    """Text, compilers and flags, and architectures of a library."""

    #: :attr:`cuda_ops.build.discovery.Text.hash`
    source_hash: str
    #: :func:`cuda_ops.build.commands.recipe`
    recipe: str
    #: The GPUs that it holds kernels for; empty where it holds none.
    archs: tuple[str, ...]
    #: Whether it is a debug build, which only a process that asks for it may load.
    debug: bool = False

    @property
    def environment(self) -> str:
        """:func:`cuda_ops.build.commands.environment`."""
        return "".join(self.recipe.partition("-")[1:])


def of(
    pair: Pair, archs: tuple[str, ...], text: Text | None = None, debug: bool = False
) -> Provenance:
    """Returns what a build makes the pair's library from: ``text``, or its files as they are."""
    text = text or pair.read()
    built_for = archs if commands.uses_cuda(pair) else ()
    return Provenance(text.hash, commands.recipe(pair, archs, debug), built_for, debug)


def write(library: Path, provenance: Provenance) -> None:
    """Appends the line to a library that was just linked."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    archs = ";".join(provenance.archs) or _NO_ARCHS
    recipe = "debug-" * provenance.debug + provenance.recipe
    with library.open("ab") as file:
        file.write(f"\ncuda_ops {provenance.source_hash} {recipe} {archs} {digest}".encode())


def is_copy(library: Path, of: Path) -> bool:
    """Says whether two files have one length and one line, which holds a checksum: the library that
    the cache has may be a copy of the one that pip installed.
    """
    try:
        ends = []
        for path in (library, of):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _ENDS))
                ends.append((size, _LINE.search(file.read())))
    except OSError:
        return False
    (size, line), (other_size, other) = ends
    return size == other_size and line is not None and other is not None and line[0] == other[0]


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
        if size <= hashed:
            return parse(file.read(), library)
        start = file.read(_ENDS)
        file.seek(-_ENDS, os.SEEK_END)
        line = _line(start, file.read(), size, library)
    return None if line is None else _provenance(line)


def skim(library: Path) -> Provenance | None:
    """Reads the line as :func:`read` does, and compares the library's length alone."""
    return read(library, hashed=2 * _ENDS)


def parse(contents: bytes, library: Path) -> Provenance | None:
    """Reads the line of a library's contents, which it compares with their checksum.

    Raises:
        DamagedError: see :func:`read`.
    """
    line = _line(contents[:_ENDS], contents[-_ENDS:], len(contents), library)
    if line is None:
        return None
    linked, digest = memoryview(contents)[: -len(line[0])], line[5].decode()
    if (found := hashlib.sha256(linked).hexdigest()) != digest:
        raise DamagedError(f"{library}: expected SHA-256 {digest}, got {found}")
    return _provenance(line)


def _provenance(line: re.Match[bytes]) -> Provenance:
    source_hash, debug, recipe, archs, _ = (field.decode() for field in line.groups(b""))
    built_for = () if archs == _NO_ARCHS else tuple(archs.split(";"))
    return Provenance(source_hash, recipe, built_for, bool(debug))


def _line(start: bytes, end: bytes, size: int, library: Path) -> re.Match[bytes] | None:
    """Finds the line in the last bytes of a file whose first bytes say that it is whole."""
    if len(start) < 64 or not start.startswith(b"\x7fELF"):
        raise DamagedError(f"{library}: expected an ELF library, got {size} other bytes")
    if start[4:6] == b"\x02\x01":  # 64 bits, little endian
        # Linkers write the section headers last.
        (headers,) = struct.unpack_from("<Q", start, 40)
        entry_size, entries = struct.unpack_from("<HH", start, 58)
        if (linked := headers + entry_size * entries) > size:
            raise DamagedError(f"{library}: expected at least {linked} bytes, got {size}")
    return _LINE.search(end)
