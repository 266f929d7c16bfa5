"""Compiles a pair file by file, so that a fault costs one object, and compares objects."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.utils import cpp_extension

from cuda_ops.build import commands, toolchain
from cuda_ops.build.discovery import Pair

#: Flags that only name places or spread one build over all cores, of which many run at once.
_LEFT_OUT = ("-lineinfo", "-split-compile=0")
#: What nvcc makes up anew in each run: the id of a file, and the name of a file of its own.
_MADE_UP = re.compile(rb"(?<=_)[0-9a-f]{8}(?=_\d+_\w+?_cu_)|(?<=tmpxft_)[0-9a-f]{8}")


@dataclass(frozen=True)
class Recipe:
    """How to compile and link a pair in a copy of its root, which is the current folder."""

    pair: Pair
    archs: tuple[str, ...]

    @property
    def why_not(self) -> str:
        """Why the pair cannot be built file by file; empty if it can."""
        if self.pair.options.relocatable_device_code:
            return "its device code is linked across files"
        return ""

    def sources(self) -> list[Path]:
        """Lists what is compiled on this machine: without a CUDA toolkit, no ``.cu``."""
        return [*map(Path, commands.sources(self.pair))]

    def compile(self, source: Path, result: Path) -> list[str]:
        """Returns the command that makes an object.

        It names no absolute path below the root: equal texts in two copies give equal objects.
        """
        root, home = self.pair.root, toolchain.cuda_home()
        cuda = source.suffix == ".cu"
        own = [*self.pair.include_dirs]
        folders = [f"-I{_within(folder, root)}" for folder in own]
        system = [*map(Path, cpp_extension.include_paths()), *commands.system_dirs(self.pair)]
        system += [home / "include"] if home is not None else []
        folders += [word for folder in system for word in ("-isystem", str(folder))]
        if cuda:
            assert home is not None
            flags = commands.nvcc_flags(self.pair, self.archs)
            words = [str(home / "bin" / "nvcc"), "-no-compress", "--compiler-options", "-fPIC"]
        else:
            flags = commands.cxx_flags(self.pair, self.archs)
            words = [*toolchain.cxx(), "-fPIC"]
        flags = [word for word in shlex.split(" ".join(flags)) if word not in _LEFT_OUT]
        return [*words, *folders, *flags, "-c", str(_within(source, root)), "-o", str(result)]

    def link(self, objects: Sequence[Path], result: Path) -> list[str]:
        """Returns the command that makes the library."""
        flags = shlex.split(" ".join(commands.link_flags(self.pair)))
        torch = [f"-L{folder}" for folder in cpp_extension.library_paths()]
        return [
            *toolchain.cxx(), *map(str, objects), "-shared", *flags, *torch,
            "-lc10", "-ltorch_cpu", "-ltorch", "-o", str(result),
        ]  # fmt: skip


def _within(path: Path, root: Path) -> Path:
    return path.relative_to(root) if path.is_relative_to(root) else path


def same(first: Path, second: Path) -> bool:
    """Says whether two objects do the same, byte for byte but for what nvcc makes up."""
    return _known(first) == _known(second)


def _known(path: Path) -> bytes:
    contents = path.read_bytes()
    return _MADE_UP.sub(b"", contents) if path.name.endswith(".cuda.o") else contents
