"""Builds that start no compiler, for tests of what happens around one."""

from __future__ import annotations

import struct
from pathlib import Path

from cuda_ops.build import compiling, provenance
from cuda_ops.build.discovery import Pair, Text

#: An ELF file as far as its header says: section headers would begin at its end.
LIBRARY = (b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", 1 << 14)).ljust(1 << 14, b"\0")
COMPILED = LIBRARY + b"compiled"


def compiled(
    pair: Pair, archs: tuple[str, ...], text: Text, work: Path, verbose: bool, debug: bool
) -> Text:
    """Stands in for :func:`cuda_ops.build.compiling._compile`."""
    library = compiling.library_path(pair, archs, text, debug)
    library.write_bytes(COMPILED)
    library.chmod(0o755)
    provenance.write(library, provenance.of(pair, archs, text, debug))
    return pair.read()
