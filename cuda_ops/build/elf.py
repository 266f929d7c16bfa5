"""What the file of a library says without being opened: what it needs, and where its code runs.

Standard library only, so that it works where torch does not.
"""

from __future__ import annotations

import re
import struct

#: A mangled name with a component of torch's C++ libraries, which change with every release.
TORCH_CPP = re.compile(r"_Z.*?(?<!\d)(2at|3c10|5torch|6caffe2)")
_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
_DYNAMIC_SYMBOLS = 11
_WEAK = 2


def runs_on(archs: str, capability: tuple[int, int]) -> bool:
    """Tells whether code for ``"8.0 9.0a 12.0+PTX"`` runs on a device of this capability.

    Machine code runs on its own capability and on later ones with the same major number, ``a`` code
    on its own alone, PTX on every later one.
    """
    for major, minor, exact, ptx in _ARCH.findall(archs):
        built = int(major), int(minor)
        same_family = built[0] == capability[0] and built[1] <= capability[1]
        if built == capability or (same_family and exact != "a") or (ptx and built <= capability):
            return True
    return False


def undefined_symbols(elf: bytes) -> list[tuple[str, bool]]:
    """Returns name and weakness of a 64-bit little-endian library's undefined dynamic symbols."""
    (sections_at,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQII", elf, sections_at + i * size) for i in range(count)]
    found = []
    for _, kind, _, _, offset, length, link, _ in sections:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        strings = sections[link][4]
        for at in range(offset + 24, offset + length, 24):  # the first symbol is a placeholder
            name, info, _, section = struct.unpack_from("<IBBH", elf, at)
            if section == 0:
                end = elf.index(b"\0", strings + name)
                found.append((elf[strings + name : end].decode(), info >> 4 == _WEAK))
    return found
