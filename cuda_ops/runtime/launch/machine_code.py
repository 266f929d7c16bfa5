"""The kernels in a library's machine code: names, registers, shared memory and launch bounds.

Read from the ELF files that nvcc embeds, one for each architecture, so that no tool of the CUDA
toolkit is needed.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: A compute capability, major and minor.
Capability = tuple[int, int]

#: The most threads of a block that any GPU takes.
MOST_THREADS = 1024
#: Bytes of shared memory of each block that the driver keeps for itself. From 9.0 on they are part
#: of what the machine code declares.
RESERVED = 1024


@dataclass(frozen=True)
class Kernel:
    """One kernel as it was compiled for one architecture."""

    #: As C++ writes it: ``"void cuda_ops::flat_kernel<...>(...)"``.
    name: str
    #: As the library has it.
    symbol: str
    #: The compute capability that its machine code is for.
    capability: Capability
    #: Registers of one thread.
    registers: int
    #: Bytes of shared memory that the code declares.
    shared_bytes: int
    #: The most threads that a block may have: ``__launch_bounds__``, or what the GPU allows.
    max_threads: int
    #: Whether ``max_threads`` is a launch bound.
    is_bounded: bool
    #: Bytes of a thread's stack in local memory.
    stack_bytes: int = 0
    #: Bytes of registers that were stored to local memory, where the log of the build says so.
    spilled_bytes: int | None = None
    #: Barriers of a block.
    barriers: int = 0


def kernels_in(library: Path) -> list[Kernel]:
    """Reads the machine code in a library; see :func:`kernels_of`. PTX alone has no registers yet.

    Raises:
        OSError: the file cannot be read.
        RuntimeError: the kernels are compressed.
    """
    spills = _spills(library)
    found = []
    for name, section in _sections(library.read_bytes()):
        if name == ".nv_fatbin":
            for capability, code in _machine_code(section, library):
                found += _kernels(code, capability, spills)
    return found


_FAT_MAGIC, _ELF_KIND = 0xBA55ED50, 2


def _machine_code(fat: bytes, library: Path) -> Iterator[tuple[Capability, bytes]]:
    """Yields what a section of fat binaries holds for each architecture: a header, then entries
    that each have one themselves.
    """
    at = 0
    while at + 16 <= len(fat):
        magic, _, header, size = struct.unpack_from("<IHHQ", fat, at)
        if magic != _FAT_MAGIC:  # what fills up to the next one
            at += 8
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, skip, length = struct.unpack_from("<HHIQ", fat, entry)
            (arch,) = struct.unpack_from("<I", fat, entry + 28)
            if kind == _ELF_KIND:
                code = fat[entry + skip : entry + skip + length]
                if not code.startswith(b"\x7fELF"):
                    raise RuntimeError(
                        f"kernels_in: {library}: expected plain machine code, got compressed; "
                        "build it without -Xfatbin -compress-all and with --compress-mode=none"
                    )
                yield divmod(arch, 10), code
            entry += skip + length
        at = end


# Attributes of a kernel, in sections named .nv.info.
_MAX_THREADS, _FRAME, _BLOCK_SIZE, _REGISTER_COUNT, _BARRIERS = 0x05, 0x11, 0x10, 0x2F, 0x4C


def _kernels(
    code: bytes, capability: Capability, spills: dict[tuple[Capability, str], int]
) -> list[Kernel]:
    sections = list(_sections(code))
    shared = {
        name.removeprefix(".nv.shared."): len(held) - (RESERVED if capability >= (9, 0) else 0)
        for name, held in sections
        if name.startswith(".nv.shared.")
    }
    by_name = dict(sections)
    symbols = _symbols(by_name)
    counted: dict[int, dict[str, int]] = {_REGISTER_COUNT: {}, _FRAME: {}}
    for attribute, _, held in _attributes(by_name.get(".nv.info", b"")):
        if attribute in counted and len(held) == 8:
            symbol, number = struct.unpack("<II", held)
            counted[attribute][symbols[symbol]] = number
    kernels = []
    for name, held in sections:
        # A function that kernels call has registers too, but no launch parameters.
        if not name.startswith(".nv.info."):
            continue
        symbol_name = name.removeprefix(".nv.info.")
        bound, barriers, has_bound = MOST_THREADS, 0, False
        for attribute, short, body in _attributes(held):
            if attribute in (_MAX_THREADS, _BLOCK_SIZE) and len(body) == 12:
                x, y, z = struct.unpack("<III", body)
                bound, has_bound = x * y * z, True
            elif attribute == _BARRIERS:
                barriers = short & 0xFF
        kernels.append(
            Kernel(
                _demangled(symbol_name),
                symbol_name,
                capability,
                counted[_REGISTER_COUNT].get(symbol_name, 0),
                max(0, shared.get(symbol_name, 0)),
                min(bound, MOST_THREADS),
                has_bound,
                counted[_FRAME].get(symbol_name, 0),
                spills.get((capability, symbol_name)),
                barriers,
            )
        )
    return kernels


def _attributes(held: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields number, the short after it, and the bytes that follow where the form has some."""
    at = 0
    while at + 4 <= len(held):
        form, attribute, short = struct.unpack_from("<BBH", held, at)
        length = short if form == 4 else 0
        yield attribute, short, held[at + 4 : at + 4 + length]
        at += 4 + length


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields the sections of a 64-bit ELF file; one without contents is as many zeros."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name_at, kind, _, _, offset, length, *_ in headers:
        name = _text(elf, names + name_at)
        yield name, bytes(length) if kind == 8 else elf[offset : offset + length]


def _symbols(sections: dict[str, bytes]) -> list[str]:
    table, names = sections.get(".symtab", b""), sections.get(".strtab", b"")
    return [_text(names, struct.unpack_from("<I", table, at)[0]) for at in range(0, len(table), 24)]


def _text(held: bytes, at: int) -> str:
    return held[at : held.index(b"\0", at)].decode()


_COMPILED = re.compile(
    r"Compiling entry function '(\S+)' for 'sm_(\d+)(\d)[af]?'"
    r"(?:(?!Compiling entry).)*?(\d+) bytes spill stores",
    re.DOTALL,
)


def _spills(library: Path) -> dict[tuple[Capability, str], int]:
    """Returns what ptxas said of each kernel, where the log lies beside the library."""
    try:
        log = library.with_suffix(".nvcc.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {
        ((int(major), int(minor)), symbol): int(spilled)
        for symbol, major, minor, spilled in _COMPILED.findall(log)
    }


@functools.cache
def _demangled(symbol: str) -> str:
    """Returns a name as C++ writes it, by the library that torch has loaded already."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    made = demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not made:
        return symbol
    try:
        return ctypes.string_at(made).decode()
    finally:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(made)
