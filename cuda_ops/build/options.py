"""What a pair asks of its build, beyond the two files: flags, folders, libraries, more sources.

A pair says it in its own text, in comments that begin a line of either file::

    // cuda_ops.build: nvcc_flags --use_fast_math -maxrregcount=64
    // cuda_ops.build: libraries cublasLt

A formatter may break a long line, so a key may be written several times.

A root says it in ``build.toml``, for all its pairs and for single ones, such as guests that nothing
may be written into::

    defines = ["NDEBUG"]

    [pairs.lltm]
    sources = ["kernels/lltm_kernel.cu"]

Standard library only, so that ``setup.py`` can use it before torch is there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cuda_ops.errors import BuildError

#: The file of a root.
FILE = "build.toml"

_LINE = re.compile(r"^[ \t]*//[ \t]*cuda_ops\.build:[ \t]*(\S*)[ \t]*(.*?)[ \t]*\r?$", re.MULTILINE)
#: The words in a comment that they do not begin, where they would be overlooked.
_STRAY = re.compile(r"//[^\n]*\S[^\n]*\bcuda_ops\.build:|/\*[^*\n]*\bcuda_ops\.build:")
#: Flags after which results are not those of IEEE arithmetic, and what becomes of them.
_INEXACT = {
    "use_fast_math": "denormals become 0, and division, root and functions are approximate",
    "ftz=true": "denormals become 0",
    "prec-div=false": "division is approximate",
    "prec-sqrt=false": "square roots are approximate",
    "ffast-math": "NaN and infinity are not expected, and sums may be reordered",
    "Ofast": "NaN and infinity are not expected, and sums may be reordered",
    "ffinite-math-only": "NaN and infinity are not expected",
    "funsafe-math-optimizations": "sums may be reordered",
}


@dataclass(frozen=True)
class Options:
    """What one pair asks for. Paths are absolute."""

    #: For the C++ compiler, behind those of cuda_ops.
    cxx_flags: tuple[str, ...] = ()
    #: For nvcc, behind those of cuda_ops.
    nvcc_flags: tuple[str, ...] = ()
    #: For the linker.
    link_flags: tuple[str, ...] = ()
    #: Macros for both compilers, ``NAME`` or ``NAME=VALUE``.
    defines: tuple[str, ...] = ()
    #: Folders with headers. Those of the root are read for changes, those of packages are not.
    include_dirs: tuple[Path, ...] = ()
    #: Folders with libraries.
    library_dirs: tuple[Path, ...] = ()
    #: Libraries to link with, ``cublasLt`` for ``libcublasLt.so``.
    libraries: tuple[str, ...] = ()
    #: Further files to compile, ``.cu`` or C++.
    sources: tuple[Path, ...] = ()
    #: Whether kernels of one ``.cu`` call device functions of another.
    relocatable_device_code: bool = False

    def __bool__(self) -> bool:
        return self != Options()

    def as_json(self) -> dict[str, Any]:
        """Returns what is not the default, for a report."""
        given = {k: v for k, v in asdict(self).items() if v}
        return {k: [str(one) for one in v] if isinstance(v, tuple) else v for k, v in given.items()}

    def inexact(self) -> list[str]:
        """Returns a line for each flag that gives up IEEE arithmetic."""
        found = []
        for flag in (*self.cxx_flags, *self.nvcc_flags):
            if (what := _INEXACT.get(flag.lstrip("-").replace(" ", ""))) is not None:
                found.append(f"built with {flag}: {what}")
        return found

    def fingerprint(self) -> list[str]:
        """Returns what goes into the key of a build beside the flags: the versions of the packages
        whose headers are used.
        """
        return [f"{folder}:{_version_of(folder)}" for folder in self.include_dirs]


_KEYS = {field.name: field for field in fields(Options)}
_PATHS = ("include_dirs", "library_dirs", "sources")


def read(stem: str, root: Path, texts: Iterable[tuple[Path, str]]) -> Options:
    """Returns what the root's file and the texts of the pair's files ask for, in this order.

    Raises:
        BuildError: an unknown key, a value of another form, a file or folder that is not there, or
            a package that is not installed.
    """
    asked: dict[str, list[str]] = {}
    for key, words, where in _asked(stem, root, texts):
        if key not in _KEYS:
            raise BuildError(f"{where}: expected one of {', '.join(_KEYS)}, got {key!r}")
        if key == "relocatable_device_code":
            if words not in ([], ["true"]):
                raise BuildError(f"{where}: {key}: expected nothing behind it, got {words}")
            words = ["true"]
        elif not words:
            raise BuildError(f"{where}: {key}: expected words behind it, got none")
        elif key in _PATHS:
            words = [str(_path(word, key, root, where)) for word in words]
        asked.setdefault(key, []).extend(words)
    values: dict[str, Any] = {}
    for key, words in asked.items():
        unique = words if key.endswith("_flags") else [*dict.fromkeys(words)]
        values[key] = tuple(Path(word) if key in _PATHS else word for word in unique)
    if "relocatable_device_code" in values:
        values["relocatable_device_code"] = True
    return Options(**values)


def text_for(stem: str, root: Path) -> str:
    """Returns what the root's file says for one pair, in a form that equal contents share; empty
    where it says nothing.
    """
    section = [(key, words) for key, words, _ in _in_file(stem, root)]
    return json.dumps(section) if section else ""


def _asked(
    stem: str, root: Path, texts: Iterable[tuple[Path, str]]
) -> Iterator[tuple[str, list[str], str]]:
    yield from _in_file(stem, root)
    for path, text in texts:
        if stray := next((m for m in _STRAY.finditer(text)), None):
            raise BuildError(
                f"{path}:{text.count(chr(10), 0, stray.start()) + 1}: expected 'cuda_ops.build:' "
                "to begin a comment of its own, got it inside of another, perhaps by clang-format; "
                "leave an empty line before it"
            )
        for match in _LINE.finditer(text):
            where = f"{path}:{text.count(chr(10), 0, match.start()) + 1}: cuda_ops.build"
            try:
                yield match[1], shlex.split(match[2]), where
            except ValueError as error:
                raise BuildError(f"{where}: {match[1]}: {error}: {match[2]}") from None


def _in_file(stem: str, root: Path) -> Iterator[tuple[str, list[str], str]]:
    path, pairs = root / FILE, pairs_in_file(root)
    contents = {key: value for key, value in _contents(root).items() if key != "pairs"}
    for where, table in ((str(path), contents), (f"{path}: [pairs.{stem}]", pairs.get(stem, {}))):
        if not isinstance(table, dict):
            raise BuildError(f"{where}: expected a table, got {table!r}")
        for key, value in table.items():
            yield key, _words(value, f"{where}: {key}"), where


def _words(value: Any, where: str) -> list[str]:
    if value is True:
        return ["true"]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise BuildError(f"{where}: expected a list of strings, got {value!r}")
    return value


def pairs_in_file(root: Path) -> Mapping[str, Any]:
    """Returns the tables ``[pairs.NAME]`` of a root's file.

    Raises:
        BuildError: it is no TOML, or has no such tables.
    """
    pairs = _contents(root).get("pairs", {})
    if not isinstance(pairs, dict):
        raise BuildError(f"{root / FILE}: pairs: expected tables [pairs.NAME], got {pairs!r}")
    return pairs


def _contents(root: Path) -> dict[str, Any]:
    try:
        text = (root / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    # Imported here: a root without the file needs neither.
    module = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        contents: dict[str, Any] = module.loads(text)
    except ValueError as error:
        raise BuildError(f"{root / FILE}: {error}") from None
    return contents


def _path(word: str, key: str, root: Path, where: str) -> Path:
    """Finds ``include`` under the root, ``/opt/x/include``, or ``torch:include`` in a package."""
    package, colon, inside = word.partition(":")
    path = _in_package(package, inside, f"{where}: {key}") if colon else root / word
    if key == "sources" and not path.is_file():
        raise BuildError(f"{where}: sources: expected a file, got {path}, which does not exist")
    if key != "sources" and not path.is_dir():
        raise BuildError(f"{where}: {key}: expected a folder, got {path}, which does not exist")
    return path.resolve()


def _in_package(package: str, inside: str, where: str) -> Path:
    """Returns a path in an installed package, by the name that pip or Python knows it by."""
    try:
        found = importlib.metadata.distribution(package).locate_file(inside)
        if Path(str(found)).exists():
            return Path(str(found))
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / inside).exists():
            return Path(folder) / inside
    if spec is None:
        raise BuildError(
            f"{where}: expected an installed package, got {package!r}; pip install {package}"
        )
    raise BuildError(f"{where}: expected a path in package {package!r}, got {inside!r}")


def _version_of(folder: Path) -> str:
    """Returns the version of the package that a folder lies in; empty outside of packages."""
    for parent in folder.parents:
        if parent.name in ("site-packages", "dist-packages"):
            top = folder.relative_to(parent).parts[0]
            for name in importlib.metadata.packages_distributions().get(top, ()):
                return importlib.metadata.version(name)
    return ""
