"""Compilers, toolkits and GPU architectures: what this machine has.

Standard library only, so that ``setup.py`` can use it before torch is there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cuda_ops.errors import BuildError

#: What a release is built for; a plain number is machine code, ``+PTX`` adds PTX for later GPUs.
RELEASE_ARCHS = ("8.0", "8.6", "8.9", "9.0a", "10.0", "12.0+PTX")
#: What the dev loop builds for on a machine without a GPU.
DEFAULT_ARCH = "9.0a"


#: The name of the dev build's script around nvcc.
NVCC_SCRIPT = "nvcc-keeping-its-log"

#: The compilers of one operator stay well below this.
_BYTES_PER_OPERATOR = 2 << 30
#: Where the toolkit is installed for all users.
_SYSTEM = Path("/usr/local")
#: What makes a folder a toolkit.
_NVCC, _HEADER = "bin/nvcc", "include/cuda_runtime_api.h"
#: NVIDIA's wheels that make a toolkit, each with a part that only it has.
_WHEELS = {
    "nvidia-cuda-nvcc": _NVCC,
    "nvidia-cuda-crt": "include/crt/host_config.h",
    "nvidia-nvvm": "nvvm/bin/cicc",
    "nvidia-cuda-runtime": "lib/libcudart_static.a",
    "nvidia-cuda-cccl": "include/cccl",
}
#: The command that brings them.
INSTALL_NVCC = 'pip install "cuda_ops[nvcc]"'
#: A compiler says its version within milliseconds, on a busy machine within seconds.
_ANSWER_SECONDS = 30.0
_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
#: What torch takes the name of a generation for; it has them inside a function.
_GENERATIONS = {
    "Kepler": ("3.5+PTX",),
    "Kepler+Tesla": ("3.7",),
    "Maxwell": ("5.0", "5.2+PTX"),
    "Maxwell+Tegra": ("5.3",),
    "Pascal": ("6.0", "6.1+PTX"),
    "Volta": ("7.0+PTX",),
    "Volta+Tegra": ("7.2",),
    "Turing": ("7.5+PTX",),
    "Ampere": ("8.0", "8.6+PTX"),
    "Ampere+Tegra": ("8.7",),
    "Ada": ("8.9+PTX",),
    "Hopper": ("9.0+PTX",),
    "Blackwell": ("10.0", "10.3", "12.0", "12.1+PTX"),
    "Blackwell+Tegra": ("11.0",),
}


@functools.cache
def cuda_home() -> Path | None:
    """Finds the CUDA toolkit: CUDA_HOME, CUDA_PATH, the nvcc on PATH, /usr/local/cuda*, then the
    wheels that ``pip install "cuda_ops[nvcc]"`` brings.

    What is said outright comes first, then what every other build on this machine takes. The
    wheels come last: pip may have brought them for another package, they hold less than an
    installed toolkit (no debugger, no compute-sanitizer), and a library's key must not change
    because of them. CUDA_HOME may name them too. An nvcc on PATH may be a script that calls the
    real one, so it is asked where it lives.

    A CUDA_HOME or CUDA_PATH that is no toolkit is passed over with a line on stderr, as is an nvcc
    that does not answer and a set of wheels of which one is missing: the next place is better than
    no CUDA kernels, and the line says which was left out.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if said := os.environ.get(name):
            if _is_toolkit(Path(said)) and _release(Path(said)):
                return Path(said)
            if not _is_toolkit(Path(said)):  # else _release has said it
                expected = f"a folder with {_NVCC} and {_HEADER}"
                _say(f"{name}: expected {expected}, got {said!r}, which is ignored")
    candidates = (
        [Path(found)] if (nvcc := shutil.which("nvcc")) and (found := _home_of(nvcc)) else []
    )
    candidates += (_SYSTEM / "cuda", *sorted(_SYSTEM.glob("cuda-*"), reverse=True))
    for home in candidates:
        if _is_toolkit(home) and _release(home):
            return home
    for home in _wheel_homes():
        if missing := [wheel for wheel, part in _WHEELS.items() if not (home / part).exists()]:
            _say(f"{home} lacks {', '.join(missing)} and is ignored; run {INSTALL_NVCC}")
        elif _release(home):
            return home
    return None


def _is_toolkit(home: Path) -> bool:
    return (home / _NVCC).is_file() and (home / _HEADER).is_file()


def _wheel_homes() -> list[Path]:
    """Lists where NVIDIA's wheels lie that hold an nvcc, the newest release first in each folder of
    packages. The wheels of one release share a folder, ``site-packages/nvidia/cu13``; torch brings
    some of them, without nvcc.
    """
    found: list[Path] = []
    for packages in dict.fromkeys(Path(entry).absolute() for entry in sys.path):
        homes = [home for home in (packages / "nvidia").glob("cu[0-9]*") if home.name[2:].isdigit()]
        found += sorted(homes, key=lambda home: -int(home.name[2:]))
    return [home for home in found if (home / _NVCC).is_file()]


def _say(line: str) -> None:
    print(f"cuda_ops: {line}", file=sys.stderr, flush=True)


def has_shared_runtime(home: Path) -> bool:
    """Says whether ``-lcudart`` finds a library: NVIDIA's wheels have only one with a version."""
    return (library_folder(home) / "libcudart.so").exists()


def library_folder(home: Path) -> Path:
    """Returns where a toolkit has its libraries: lib64, in NVIDIA's wheels lib."""
    return home / "lib64" if (home / "lib64").is_dir() else home / "lib"


def use_cuda_home() -> None:
    """Makes torch's builders take that toolkit.

    They look for one only when torch was built with CUDA, and an nvcc on PATH that is a script
    leads them astray.
    """
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(cuda_home())


def _home_of(nvcc: str) -> str | None:
    said = _asked(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull)
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return str(Path(top[1].strip()).resolve()) if top else None


@functools.cache
def cuda_version() -> str:
    """Returns the release of the toolkit, ``"13.0"``, or ``"none"``."""
    home = cuda_home()
    return "none" if home is None else _release(home)


@functools.cache
def _release(home: Path) -> str:
    """Returns the release of a toolkit; if its nvcc does not answer, an empty string, with a line
    on stderr.
    """
    nvcc = home / "bin" / "nvcc"
    release = re.search(r"release (\d+\.\d+)", _asked(str(nvcc), "--version"))
    if release is None:
        _say(f"{nvcc} did not report its version and is ignored")
    return release[1] if release else ""


def cxx() -> list[str]:
    """Returns the command of the C++ compiler.

    Raises:
        BuildError: ``CXX`` leaves a quote open.
    """
    return words_of("CXX") or ["c++"]


def cxx_version() -> str:
    """Returns what the C++ compiler says its version is, or ``"none"``."""
    return _first_line_of_version(*cxx())


@functools.cache
def _first_line_of_version(*command: str) -> str:
    return _asked(*command, "--version").partition("\n")[0] or "none"


def _asked(*command: str) -> str:
    """Returns what a compiler says; nothing where it does not run or answer."""
    try:
        asked = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout + asked.stderr


def parse_archs(text: str) -> tuple[str, ...]:
    """Splits ``"8.0;9.0a+PTX"`` into a tuple; spaces and commas separate too.

    As in torch, an entry may be the name of a generation, such as Hopper, or ``native``: the GPUs
    here. ``All`` is what a release is built for.

    Raises:
        ValueError: names the entry that is neither.
    """
    return tuple(arch for part in re.split(r"[;,\s]+", text) if part for arch in _archs(part))


def _archs(part: str) -> tuple[str, ...]:
    if _ARCH.fullmatch(part):
        return (part,)
    if part.lower() == "native":
        return gpu_archs() or (DEFAULT_ARCH,)
    if part.lower() == "all":
        return RELEASE_ARCHS
    if part in _GENERATIONS:
        return _GENERATIONS[part]
    raise ValueError(
        f"arch {part!r}: expected a compute capability such as 8.0, 9.0a or 12.0+PTX, or a name "
        "such as Hopper, native or All"
    )


def gpu_archs() -> tuple[str, ...]:
    """Returns the archs to build for the visible GPUs; none where CUDA cannot start."""
    import torch

    if not torch.cuda.is_available():  # device_count() counts by NVML
        return ()
    count = torch.cuda.device_count()
    found = {torch.cuda.get_device_capability(device) for device in range(count)}
    return tuple(arch_of_capability(*capability) for capability in sorted(found))


def arch_of_capability(major: int, minor: int) -> str:
    """Returns the arch to build for a visible GPU: with its own instructions from 9.0 on."""
    return f"{major}.{minor}" + ("a" if major >= 9 else "")


def serves(built: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Says whether a library for the archs ``built`` holds all that one for ``wanted`` would."""
    return {*wanted} <= {*built, *(arch.removesuffix("+PTX") for arch in built)}


def gencode_flags(archs: tuple[str, ...]) -> list[str]:
    flags = []
    for arch in archs:
        match = _ARCH.fullmatch(arch)
        if match is None:
            raise ValueError(f"arch {arch!r}: expected a compute capability such as 8.0 or 9.0a")
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def operators_at_once() -> int:
    """Returns how many operators to build at once: one a core, as far as memory allows.

    An operator is two compiler runs, and nearly all of its time is the kernel's. ``MAX_JOBS``,
    where it is set, counts both.

    Raises:
        ValueError: ``MAX_JOBS`` is no number.
    """
    listed = os.environ.get("MAX_JOBS")
    try:
        most = int(listed) // 2 if listed else os.cpu_count() or 1
    except ValueError:
        raise ValueError(f"MAX_JOBS: expected a number of compilers, got {listed!r}") from None
    return max(1, min(most, _available_memory() // _BYTES_PER_OPERATOR))


def _available_memory() -> int:
    """Returns the bytes that are free, or hold copies of files and would be given up."""
    with contextlib.suppress(OSError):
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        if found := re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE):
            return int(found[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def words_of(variable: str) -> list[str]:
    value = os.environ.get(variable, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise BuildError(
            f"{variable}: expected words quoted as for a shell, got {value!r}: {error}"
        ) from None
