"""Class 1: a library that this torch, or this GPU, cannot run."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path

import torch

from cuda_ops.dispatch.library import open_library
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.draw import NOTHING
from cuda_ops.testing.stable_symbols import is_stable, oldest
from cuda_ops.testing.subject import Subject

# A mangled name with a component of torch's C++ libraries, which change with every release.
_TORCH_CPP = re.compile(r"_Z.*?(?<!\d)(2at|3c10|5torch|6caffe2)")
_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
_DYNAMIC_SYMBOLS = 11
_WEAK = 2


def _not_built(subject: Subject, device: str) -> str:
    if subject.op.guest:
        return "a guest is built for one torch, on this machine"
    return "" if subject.origin.library else "not built from a pair"


@check("abi", 1, "ABI, architecture or toolchain mismatch", NOTHING, devices=("any",), quick=True,
       excuse=_not_built)  # fmt: skip
def abi(case: Case) -> None:
    """Checks that undefined symbols are stable, here and in the oldest torch, and that there is
    code for the GPU.
    """
    path = Path(case.subject.origin.library)
    handle = ctypes.CDLL(str(path))
    unstable, missing, later = [], [], []
    for name, weak in undefined_symbols(path.read_bytes()):
        if _TORCH_CPP.match(name):
            unstable.append(name)
        elif not weak and not hasattr(handle, name):
            missing.append(name)
        elif not weak and is_stable(name) and name not in oldest():
            later.append(name)
    assert not unstable, (
        f"{path.name} needs symbols of torch's C++ ABI, which differ from release to release: "
        f"{', '.join(unstable)}; use the stable ABI's functions"
    )
    assert not missing, f"{path.name} needs symbols that this process lacks: {', '.join(missing)}"
    assert not later, (
        f"{path.name} needs functions that torch 2.10, the oldest that it must load in, does not "
        f"have: {', '.join(later)}"
    )
    if "CUDA" not in case.subject.op.keys:
        return
    op = case.subject.op
    archs = open_library(path, op.stem, op.namespace).archs
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        assert runs_on(archs, capability), (
            f"{path.name} holds code for {archs}, and cuda:{index} has capability "
            f"{capability[0]}.{capability[1]}"
        )


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
