"""What the text of a source says: how it registers operators, and which headers it includes.

Standard library only, so that ``setup.py`` can use it before torch is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path

from cuda_ops.names import HOME

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUOTED_OR_COMMENT = re.compile(
    rf""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|{_COMMENT.pattern}""", re.DOTALL
)
_OPENING, _CLOSING = "([{", ")]}"
_NATIVE = re.compile(r"\bCUDA_OPS\s*\(\s*(?:(\w+)\s*,)?")
_PYBIND = re.compile(r"\bPYBIND11_MODULE\s*\(\s*(\w+)")
#: The namespace that a guest registers its operators in.
_REGISTERS = re.compile(
    r"\b(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT|_EXPAND)?\s*\(\s*(\w+)"
    r'|\bRegisterOperators\b[^;]*?"(\w+)::'
)
_MAY_REGISTER = re.compile(rb"TORCH_LIBRARY|RegisterOperators")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


class Kind(Enum):
    """How the files of a pair register their operators."""

    #: ``CUDA_OPS(library)``: through the manifest, reloadable in place.
    NATIVE = "native"
    #: ``PYBIND11_MODULE``: a guest, imported as a Python module.
    PYBIND = "pybind11"
    #: ``TORCH_LIBRARY`` or ``STABLE_TORCH_LIBRARY``: a guest that registers itself when opened.
    TORCH_LIBRARY = "TORCH_LIBRARY"


def text_of(path: Path) -> str:
    """Returns what a source says."""
    return path.read_text(encoding="utf-8", errors="replace")


def code_in(text: str) -> str:
    """Returns a text without its comments; lines keep their numbers."""
    return _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)


def code_of(path: Path) -> str:
    """Returns what a source says, without comments."""
    return code_in(text_of(path))


def masked(text: str, quotes: bool = True) -> str:
    """Returns a text with spaces for its comments and, with ``quotes``, for what stands in quotes:
    what is found in it lies at the same place in the text.
    """

    def spaces(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] == "/":
            return re.sub(r"[^\n]", " ", text)
        return f"{text[0]}{' ' * (len(text) - 2)}{text[-1]}" if quotes else text

    return _QUOTED_OR_COMMENT.sub(spaces, text)


def line_at(code: str, at: int) -> int:
    """Returns the number of the line that a place in a text lies on."""
    return code.count("\n", 0, at) + 1


def closing(code: str, start: int) -> int:
    """Returns where the bracket closes that was opened before ``start``; the end if it does not."""
    depth = 1
    for at in range(start, len(code)):
        depth += (code[at] in _OPENING) - (code[at] in _CLOSING)
        if depth == 0:
            return at
    return len(code)


def arguments_in(text: str) -> list[str]:
    """Splits a text at the commas outside of quotes and brackets, those of templates included."""
    mask = masked(text).replace("->", "  ")
    if mask.count("<") != mask.count(">"):  # comparisons
        mask = mask.replace("<", " ").replace(">", " ")
    depth, last, parts = 0, 0, []
    for at, letter in enumerate(mask):
        depth += (letter in _OPENING + "<") - (letter in _CLOSING + ">")
        if letter == "," and depth == 0:
            parts.append(text[last:at])
            last = at + 1
    parts.append(text[last:])
    return [part.strip() for part in parts] if text.strip() else []


def namespace_in(code: str) -> str:
    """Returns the namespace that ``CUDA_OPS`` names in a text; empty if there is none."""
    found = _NATIVE.search(code)
    return (found[1] or HOME) if found else ""


def macro_of(namespace: str) -> str:
    """Returns how a binding begins its list of operators."""
    return f"CUDA_OPS({'' if namespace == HOME else f'{namespace}, '}library)"


def kind_of(code: str) -> Kind | None:
    """Returns how a text registers operators; ``None`` if it registers none."""
    return next(kinds_of(code), None)


def kinds_of(code: str) -> Iterator[Kind]:
    """Yields how a text registers operators, what counts most first."""
    if _NATIVE.search(code):
        yield Kind.NATIVE
    if _PYBIND.search(code):
        yield Kind.PYBIND
    if re.search(
        r"\b(STABLE_)?TORCH_LIBRARY(_FRAGMENT|_IMPL|_EXPAND)?\s*\(|\bRegisterOperators\b", code
    ):
        yield Kind.TORCH_LIBRARY


def module_in(code: str) -> str:
    """Returns the name that ``PYBIND11_MODULE`` gives a module, if it is not the file's."""
    names = (match[1] for match in _PYBIND.finditer(code))
    return next((name for name in names if name != "TORCH_EXTENSION_NAME"), "")


def may_register(path: Path) -> bool:
    """Says whether a closer look could find that a file registers operators with torch."""
    return _MAY_REGISTER.search(path.read_bytes()) is not None


def registers_in(code: str) -> Iterator[str]:
    """Yields the namespaces of ``torch.ops`` that a guest registers operators in."""
    for match in _REGISTERS.finditer(code):
        yield match[1] or match[2]


def closure(
    sources: Iterable[Path], include_dirs: Iterable[Path], texts: dict[Path, bytes]
) -> Iterator[Path]:
    """Yields the sources, then the headers reached by ``#include "..."``; reads each once."""
    dirs = tuple(include_dirs)
    seen: set[Path] = set()
    todo = list(sources)
    while todo:
        path = todo.pop(0)
        if path in seen:
            continue
        seen.add(path)
        yield path
        if path not in texts:
            texts[path] = path.read_bytes()
        for quoted, angled in _INCLUDE.findall(texts[path].decode(errors="replace")):
            name = quoted or angled
            places = (path.parent, *dirs) if quoted else dirs
            found = next((d / name for d in places if (d / name).is_file()), None)
            if found is not None:
                todo.append(found.resolve())
