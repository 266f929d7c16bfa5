"""Compiles one C++ file to a shared library that torch's headers and libraries go into."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cuda_ops.build import missing, toolchain
from cuda_ops.errors import BuildError


def compile_shared(
    source: str, path: Path, flags: Sequence[str], libraries: Sequence[str] = ()
) -> None:
    """Compiles a text and puts the library in place, whole or not at all.

    Args:
        source: the C++ text.
        path: the library to write. Processes that have an older one open keep it.
        flags: those of compiler and linker, before the user's.
        libraries: what to link with, ``-ltorch_cpu``.

    Raises:
        BuildError: there is no compiler, or it refuses; with what it said.
    """
    if problem := missing.cxx_problem():
        raise BuildError(f"{path.name}: {problem}")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as work:
        text, linked = Path(work) / "source.cpp", Path(work) / path.name
        text.write_text(source, encoding="ascii")
        command = _command(text, linked, flags, libraries)
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            raise BuildError(f"{path.name} does not compile:\n{done.stdout}{done.stderr}")
        linked.replace(path)


def _command(
    source: Path, linked: Path, flags: Sequence[str], libraries: Sequence[str]
) -> list[str]:
    from torch.utils import cpp_extension  # setup.py may come before torch

    words = toolchain.words_of
    return [
        *toolchain.cxx(),
        *flags,
        "-fPIC",
        *(f"-I{folder}" for folder in cpp_extension.include_paths()),
        *(flag for name in ("CFLAGS", "CPPFLAGS", "CXXFLAGS") for flag in words(name)),
        "-g0",  # no folder of this machine
        "-shared",
        str(source),
        "-o",
        str(linked),
        f"-Wl,-soname,{linked.name}",
        "-Wl,--exclude-libs,ALL",
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *words("LDFLAGS"),
        *libraries,
    ]
