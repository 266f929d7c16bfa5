"""``compile_commands.json``: what clangd needs to understand bindings and kernels.

https://clang.llvm.org/docs/JSONCompilationDatabase.html. The entries are what
clang would be called with, not g++ and nvcc: clangd does not know nvcc's flags.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from cuda_ops.build import commands, toolchain
from cuda_ops.build.discovery import PACKAGE, Pair
from cuda_ops.build.source_text import Kind
from cuda_ops.errors import BuildError

NAME = "compile_commands.json"


def write(pairs: Iterable[Pair], archs: tuple[str, ...]) -> None:
    """Brings ``<root>/compile_commands.json`` of each root up to date.

    Leaves installed packages and read-only folders alone.
    """
    by_root: dict[Path, list[dict[str, object]]] = {}
    for pair in pairs:
        by_root.setdefault(pair.root, []).extend(
            {
                "directory": str(pair.root),
                "file": str(source),
                "arguments": _call(pair, source, archs),
            }
            for source in pair.sources
        )
    for root, entries in by_root.items():
        path = root / NAME
        text = json.dumps(entries, indent=1) + "\n"
        if PACKAGE in root.parents or not os.access(root, os.W_OK):
            continue
        if not (path.is_file() and path.read_text() == text):
            path.write_text(text)


def _call(pair: Pair, source: Path, archs: tuple[str, ...]) -> list[str]:
    home = toolchain.cuda_home()
    call = ["clang++", "-std=c++17", *(f"-I{folder}" for folder in pair.include_dirs)]
    if source.suffix == ".cu":
        newest = archs[-1].removesuffix("+PTX").replace(".", "")
        call += ["-x", "cuda", f"--cuda-gpu-arch=sm_{newest}"]
        call += [f"--cuda-path={home}"] if home is not None else ["-nocudainc", "-nocudalib"]
    with contextlib.suppress(BuildError):  # the build says what cannot be meant
        of_compiler = commands.nvcc_flags if source.suffix == ".cu" else commands.cxx_flags
        flags = (flag.strip("'") for flag in of_compiler(pair, archs))
        call += [flag for flag in flags if flag.startswith(("-D", "-U"))]
        call += [f"-isystem{folder}" for folder in commands.system_dirs(pair)]
    if source.suffix != ".cu" or pair.kind is not Kind.NATIVE:
        include = Path(torch.__file__).parent / "include"
        call += [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]
    if home is not None:
        call.append(f"-isystem{home}/include")
    return [*call, str(source)]
