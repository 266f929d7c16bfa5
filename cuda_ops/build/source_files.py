"""The sources of a root, and which of them belong together.

Standard library only, so that ``setup.py`` can use it before torch is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cuda_ops.build.source_text import Kind, code_of, kind_of

#: What C++ sources end in.
CPP_SUFFIXES = (".cpp", ".cc", ".cxx")
#: The binding, the first ``.cu`` and the other files of a pair.
Parts = tuple[Path | None, Path | None, tuple[Path, ...]]
#: What authors add to the name of an operator in the names of its files.
_ADDED = re.compile(r"(_(cuda|cpu|gpu|kernels?|ext|extension|bindings?|ops?))+$")


class Files:
    """The sources of a root, and which of them belong together."""

    def __init__(self, root: Path) -> None:
        # Editors keep hidden files here.
        self._root = root
        self._cu = {path.stem: path for path in sorted((root / "kernels").glob("[!.]*.cu"))}
        self._cpp: dict[str, Path] = {}
        for suffix in CPP_SUFFIXES:
            for path in sorted((root / "bindings").glob(f"[!.]*{suffix}")):
                self._cpp.setdefault(path.stem, path)

    @property
    def stems(self) -> set[str]:
        """The names of all files that are not taken out."""
        return {*self._cu, *self._cpp}

    def named_by(self, tables: Mapping[str, Any]) -> dict[str, Parts]:
        """Takes out the files that the root's ``build.toml`` gives to a pair, and returns them."""
        named: dict[str, Parts] = {}
        for stem, table in tables.items():
            listed = table.get("sources", []) if isinstance(table, dict) else []
            if stem in self.stems or not isinstance(listed, list):
                continue  # they join the files of that name, see Pair.sources
            paths = [self._root / name for name in listed if isinstance(name, str)]
            if paths := [path.resolve() for path in paths if path.is_file()]:
                named[stem] = _parts(paths)
        given = {path for parts in named.values() for path in _all(parts)}
        for files in (self._cu, self._cpp):
            for stem in [stem for stem, path in files.items() if path in given]:
                del files[stem]
        return named

    def by_name(self) -> dict[str, Parts]:
        """Returns pairs by their names. What a guest's authors call its further files joins it:
        ``lltm_cuda_kernel.cu`` and ``lltm_cpu.cpp`` go with ``lltm.cpp`` or ``lltm_cuda.cpp``.
        """
        paths: dict[str, list[Path]] = {}
        owners = {stem: self._owner_of(stem) for stem in sorted(self.stems)}
        for stem, owner in owners.items():
            for files in (self._cpp, self._cu):
                if stem in files:
                    paths.setdefault(owner or stem, []).append(files[stem])
        return {stem: _parts(files, stem) for stem, files in paths.items()}

    def _owner_of(self, stem: str) -> str:
        """Returns the guest that a file belongs to which registers nothing; else nothing."""
        if stem in self._cu and stem in self._cpp:
            return ""
        base = _ADDED.sub("", stem)
        candidates = [
            other
            for other in sorted(self._cpp, key=len, reverse=True)
            if other != stem and (stem.startswith(f"{other}_") or _ADDED.sub("", other) == base)
        ]
        if not candidates or kind_of(code_of(self._cu.get(stem) or self._cpp[stem])) is not None:
            return ""
        guests = (Kind.PYBIND, Kind.TORCH_LIBRARY)
        return next((one for one in candidates if kind_of(code_of(self._cpp[one])) in guests), "")


def _parts(paths: Iterable[Path], stem: str = "") -> Parts:
    """Splits the files of a pair, those that are called as it is first."""
    paths = sorted(paths, key=lambda path: path.stem != stem)
    binding = next((path for path in paths if path.suffix in CPP_SUFFIXES), None)
    kernel = next((path for path in paths if path.suffix == ".cu"), None)
    return binding, kernel, tuple(path for path in paths if path not in (binding, kernel))


def _all(parts: Parts) -> Iterator[Path]:
    yield from (path for path in (*parts[:2], *parts[2]) if path is not None)
