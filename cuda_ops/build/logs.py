"""What the logs of compilers say: why a build failed, warnings, and what kernels need."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass

import torch

from cuda_ops.build import toolchain
from cuda_ops.build.cache import cache_dir
from cuda_ops.build.discovery import Pair
from cuda_ops.build.source_text import Kind

_COMPILER_ERROR = re.compile(
    r"\berrors?\b|undefined|multiple definition|No such file|fatal", re.IGNORECASE
)
_ASKED_FOR = re.compile(
    r"\.(cpp|cu):\d+:\d+:\s+required from here|\bat line \d+ of \S+\.cu$"  # g++, nvcc
)
_NINJA_NOISE = re.compile(r"^(\[\d+/\d+\]|FAILED|ninja: |/\S*(g\+\+|nvcc|c\+\+) |c\+\+ |g\+\+ )")
# ptxas reports as info that it has serialized every wgmma of a kernel.
_SLOW = "Potential Performance Loss"
_NVCC_WARNING = re.compile(rf"\bwarning\b|{_SLOW}", re.IGNORECASE)
_PTXAS_SPILL = re.compile(r"(\d+) bytes spill stores")
_PTXAS_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class KernelResources:
    """What ptxas said about one pair's kernels: the most that any of them needs."""

    registers: int
    spilled_bytes: int


def resources(log: str) -> KernelResources | None:
    """Returns what ptxas said about kernels; ``None`` if it said nothing."""
    registers = [int(n) for n in _PTXAS_REGISTERS.findall(log)]
    spilled = max(map(int, _PTXAS_SPILL.findall(log)), default=0)
    return KernelResources(max(registers), spilled) if registers else None


def warnings(log: str, debug: bool = False) -> tuple[str, ...]:
    """Returns the warnings of nvcc and ptxas, line by line; of a debug build without those of its
    speed.
    """
    found = (line for line in log.splitlines() if _NVCC_WARNING.search(line))
    return tuple(line for line in found if not (debug and _SLOW in line))


def explain_failure(pair: Pair, log: str) -> str:
    """Sums up the log of a failed build."""
    if "No space left on device" in log:
        # Compilers write what they hand to each other there.
        temporary = next(filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP"))), "/tmp")
        with contextlib.suppress(OSError):  # there may be no such folder
            if shutil.disk_usage(temporary).free < shutil.disk_usage(cache_dir()).free:
                return f"TMPDIR: {temporary}: No space left on device; set it to another folder"
        return f"cannot build in {cache_dir()}: No space left on device"
    lines = failing_lines(log)
    if missing := re.search(r"fatal error: ([^:\s]+): No such file", lines):
        return _why_missing(pair, missing[1]) + ":\n" + failing_lines(log, 3)
    return "does not compile:\n" + lines


def _why_missing(pair: Pair, header: str) -> str:
    """Says why a header is not found, and what brings it."""
    of_torch = re.match(r"(c10|ATen|torch)/.*cuda", header, re.IGNORECASE)
    of_toolkit = re.fullmatch(r"(cu|nv|npp)\w*\.(h|hpp|cuh)|(cub|thrust|cuda)/.*", header)
    if torch.version.cuda is None and (of_torch or (of_toolkit and pair.kind is not Kind.NATIVE)):
        return f"needs {header}, and this torch is built without CUDA"
    if of_toolkit:
        return (
            f"needs {header} of the CUDA toolkit, which is not in "
            f"{toolchain.cuda_home() or 'this machine'}; install that part of the toolkit, or name "
            "its folder, '// cuda_ops.build: include_dirs FOLDER'"
        )
    places = ", ".join(path.name for path in pair.include_dirs)
    return (
        f"needs {header}, which is not beside the file that includes it and not in {places}; put "
        f"it into {pair.root / 'utils'}, or name its folder, "
        "'// cuda_ops.build: include_dirs FOLDER'"
    )


def failing_lines(log: str, limit: int = 12) -> str:
    """Returns the lines of a build log that say what is wrong, without the command lines."""
    log = re.sub(r"^Error building extension '[^']*': ", "", log)
    log = re.sub(r"^FAILED: .*\n.*\n", "", log, flags=re.MULTILINE)  # the second is a command
    lines = [line for line in log.splitlines() if line.strip() and not _NINJA_NOISE.match(line)]
    # Where a header's template refuses something, the line that asked for it is at fault.
    errors = [line for line in lines if _COMPILER_ERROR.search(line) or _ASKED_FOR.search(line)]
    # nvcc says the same again for another dtype.
    once = re.sub(
        r"^((?:.*\n){1,2})\1+", r"\1", "".join(f"{line}\n" for line in errors or lines), flags=re.M
    )
    return "\n".join(once.splitlines()[:limit])
