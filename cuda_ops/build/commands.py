"""What a pair is built with: its sources, and the flags of compilers and linker.

The same for ``setup.py`` and ``compile_dev.py``. Standard library only, so that ``setup.py`` can
use it before torch is there.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from pathlib import Path

from cuda_ops.build import toolchain
from cuda_ops.build.discovery import Pair
from cuda_ops.build.options import Options
from cuda_ops.build.source_text import Kind
from cuda_ops.errors import BuildError

#: The oldest torch whose stable ABI the libraries use (2.10), as TORCH_TARGET_VERSION.
TORCH_TARGET = "0x020a000000000000"
#: Flags for the C++ compiler and the linker, after ours. pip's build takes the first two anyway.
FLAGS = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS")
#: What else compilers, and torch where it starts them, read from the environment.
VARIABLES = (
    *FLAGS,
    *("CC", "CXX", "LDSHARED", "LDCXXSHARED", "PYTORCH_NVCC"),
    *("CUDA_INC_PATH", "CUDNN_HOME", "CUDNN_PATH"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "PTXAS_FLAGS", "CUDAFE_FLAGS"),
    *("INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES"),  # nvcc's own too: nvcc.profile adds to them
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH"),
    *("COMPILER_PATH", "GCC_EXEC_PREFIX", "CCC_OVERRIDE_OPTIONS"),
)
#: Flags of what is built against the C shim alone. Hidden, non-unique symbols: several generations
#: of an operator live in one process, and a symbol shared between them would be the old one's.
NATIVE_FLAGS = (
    "-std=c++17",
    "-O2",
    "-Wall",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
)
#: Flags of a debug build, for the C++ compiler; they come last, since a CXXFLAGS may say -O2.
_DEBUG = ("-g", "-O0")


def uses_cuda(pair: Pair) -> bool:
    """Says whether the pair's ``.cu`` can be part of a build on this machine."""
    return toolchain.cuda_home() is not None and any(path.suffix == ".cu" for path in pair.sources)


def sources(pair: Pair) -> list[str]:
    """Lists what to compile here: without a CUDA toolkit, no ``.cu``.

    Raises:
        BuildError: two files whose objects would have one name.
    """
    chosen = [path for path in pair.sources if path.suffix != ".cu" or uses_cuda(pair)]
    objects: dict[str, Path] = {}
    for path in chosen:
        first = objects.setdefault(object_of(path), path)
        if first != path:
            raise BuildError(
                f"{pair.key}: expected sources with names of their own, got {first} and {path}; "
                "rename one of them"
            )
    return [str(path) for path in chosen]


def object_of(source: Path) -> str:
    """Returns what torch's builder calls the object of a source."""
    return f"{source.stem}{'.cuda.o' if source.suffix == '.cu' else '.o'}"


def cxx_flags(
    pair: Pair, archs: tuple[str, ...], source_hash: str = "", *, debug: bool = False
) -> list[str]:
    """Returns the flags of the binding, or of its debug build.

    A release stores ``source_hash`` in the library, so that the loader can tell
    when the sources beside it have changed since. The dev loop keeps it out of
    the flags (it would recompile the binding for every edit of the kernel).
    """
    asked = pair.options
    chosen = [
        *_defines(asked),
        *map(shlex.quote, asked.cxx_flags),
        *_flags_of("CFLAGS", "CPPFLAGS", "CXXFLAGS"),
        *(_DEBUG if debug else ()),
    ]
    if pair.kind is not Kind.NATIVE:
        # The dev loop optimizes nothing, as torch's load() does; CXXFLAGS, or cxx_flags in
        # build.toml, may say more.
        return ["-O2" if source_hash else "-O0", *_as_torch_defines(pair), *chosen]
    return [
        *NATIVE_FLAGS,
        f"-DCUDA_OPS_CUDA={int(uses_cuda(pair))}",
        f"'-DCUDA_OPS_ARCHS=\"{' '.join(archs)}\"'" if uses_cuda(pair) else "-UCUDA_OPS_ARCHS",
        *([f"'-DCUDA_OPS_SOURCE_HASH=\"{source_hash}\"'"] if source_hash else []),
        *chosen,
    ]


def nvcc_flags(pair: Pair, archs: tuple[str, ...], debug: bool = False) -> list[str]:
    """Returns the flags of the kernel, or of its debug build, in which device code is not optimized
    and knows its variables. Explicit archs keep torch's helpers from adding theirs.
    """
    asked = pair.options
    chosen = [
        *toolchain.gencode_flags(archs),
        *(["-rdc=true"] if asked.relocatable_device_code else []),
        *_defines(asked),
        *map(shlex.quote, asked.nvcc_flags),
    ]
    # -G has line numbers and no use for -split-compile: nvcc would warn of both beside it.
    speed = ["-G", "-g"] if debug else ["-lineinfo", "-split-compile=0"]
    if pair.kind is not Kind.NATIVE:
        host = ["-Xcompiler", "-O1"]  # not what is compiled for the GPU
        return [*(speed if debug else host), *_as_torch_defines(pair), *chosen]
    return [
        "-std=c++17",
        # Line numbers for profilers; the kernels of one file are optimized side by side.
        *speed,
        # The host side of a .cu only launches: optimizing it further costs build time alone.
        # An nvcc -O3 would come after this and win; for the device it is the default.
        "-Xcompiler",
        f"-O{int(not debug)},-fvisibility=hidden,-fno-gnu-unique",
        "--expt-relaxed-constexpr",
        # torch's helpers switch the half types' operators off; kernels without torch want them.
        "-U__CUDA_NO_HALF_OPERATORS__",
        "-U__CUDA_NO_HALF_CONVERSIONS__",
        "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
        "-U__CUDA_NO_HALF2_OPERATORS__",
        *chosen,
    ]


def _defines(asked: Options) -> list[str]:
    """Returns the pair's macros, for both compilers."""
    return [shlex.quote(f"-D{define}") for define in asked.defines]


def _as_torch_defines(pair: Pair) -> list[str]:
    """Returns what torch's own builders, or those of repositories with kernels, pass to both
    compilers of an extension.
    """
    cuda = ["-DWITH_CUDA", "-DUSE_CUDA"] if uses_cuda(pair) else []
    return [f"-DTORCH_EXTENSION_NAME={pair.stem}", "-DTORCH_API_INCLUDE_EXTENSION_H", *cuda]


def recipe(pair: Pair, archs: tuple[str, ...], debug: bool = False) -> str:
    """Returns the hex digest of the compilers and flags that make the pair's text a library, or its
    debug build, with :func:`environment` behind it.
    """
    parts = [toolchain.cxx_version(), *cxx_flags(pair, archs, debug=debug), *link_flags(pair)]
    parts += [*sources(pair), *map(str, pair.include_dirs)] if pair.options else []
    parts += pair.options.fingerprint()
    if uses_cuda(pair):
        parts += [toolchain.cuda_version(), *nvcc_flags(pair, archs, debug)]
    return _digest(parts) + environment()


def environment() -> str:
    """Returns a dash and the hex digest of the :data:`VARIABLES` that are set; else nothing."""
    found = [f"{name}={value}" for name in VARIABLES if (value := os.environ.get(name))]
    # While operators are built, PYTORCH_NVCC is a script of ours around the ordinary nvcc.
    found = [variable for variable in found if toolchain.NVCC_SCRIPT not in variable]
    return f"-{_digest(found)}" if found else ""


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def link_flags(pair: Pair) -> list[str]:
    """Returns the link flags: the static CUDA runtime, and nothing that a CPU-only torch lacks.

    What comes out of static archives stays private: a libstdc++ or CUDA runtime
    linked into one library must not meet another copy's symbols at run time.
    """
    home, asked = toolchain.cuda_home(), pair.options
    always = [
        "-Wl,--as-needed",
        "-Wl,--exclude-libs,ALL",
        *(shlex.quote(f"-L{folder}") for folder in asked.library_dirs),
        *map(shlex.quote, asked.link_flags),
        *_flags_of("LDFLAGS"),
    ]
    if not uses_cuda(pair) or home is None:
        return [*always, *_libraries(asked)]
    return [
        *always,
        f"-L{toolchain.library_folder(home)}",
        *_libraries(asked),
        *(["-lcudadevrt"] if asked.relocatable_device_code else []),
        "-lcudart_static",
        "-lrt",
        "-lpthread",
        "-ldl",
    ]


def _libraries(asked: Options) -> list[str]:
    """Returns how to link with the libraries that a pair asks for: by ``-l``, or by the file's name
    where NVIDIA's wheels have it, under its versioned name alone. Their folder is then searched at
    run time too; a torch with CUDA has loaded most of them by then.
    """
    flags = []
    for name in asked.libraries:
        if (wheel := _in_wheels(name, asked)) is None:
            flags.append(shlex.quote(f"-l{name}"))
        else:
            flags += [f"-L{wheel.parent}", f"-l:{wheel.name}", f"-Wl,-rpath,{wheel.parent}"]
    return flags


def system_dirs(pair: Pair) -> list[Path]:
    """Returns the folders of packages with headers, and of the wheels whose libraries a pair links
    with.
    """
    asked = pair.options
    wheels = (_in_wheels(name, asked) for name in asked.libraries)
    headers = [wheel.parent.parent / "include" for wheel in wheels if wheel is not None]
    return [*pair.system_dirs, *(folder for folder in headers if folder.is_dir())]


def _in_wheels(library: str, asked: Options) -> Path | None:
    """Finds a library of NVIDIA's wheels that neither the pair's folders nor the toolkit have:
    ``nvidia/cu13/lib``, or ``nvidia/cublas/lib`` before.
    """
    home = toolchain.cuda_home()
    folders = [*asked.library_dirs, *([toolchain.library_folder(home)] if home else [])]
    if any((folder / f"lib{library}.so").exists() for folder in folders):
        return None
    for folder in (Path(entry) / "nvidia" for entry in sys.path):
        if found := sorted(folder.glob(f"*/lib/lib{library}.so*")):
            return found[0]
    return None


def _flags_of(*variables: str) -> list[str]:
    """Returns the flags in these variables, each quoted for a shell."""
    return [shlex.quote(flag) for name in variables for flag in toolchain.words_of(name)]
