"""One library for programs without Python, which registers a package's operators when it is opened.

The registry reads an operator's library in Python: it parses the schema, works out what is checked
at each call, and registers kernels. Here the same is read while a package is built, and written
into a C++ file as tables; ``src/utils/servers/registering.h`` registers from them. The libraries of
the operators stay as they are, beside it, so both ways share one build of each kernel.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_ops.build import commands
from cuda_ops.build.discovery import BUILTIN_ROOT, Pair
from cuda_ops.build.shared import compile_shared
from cuda_ops.build.source_text import Kind
from cuda_ops.dispatch.check_rules import STRUCTS, rules_of
from cuda_ops.dispatch.library import Library, open_library
from cuda_ops.dispatch.schema_types import schema_type
from cuda_ops.errors import CudaOpsError, ManifestError
from cuda_ops.spec import OpSpec

#: What differs between two processes in a manifest. No string of it holds such a key: JSON puts a
#: backslash before each quote of a string.
_ADDRESS = re.compile(r'("(?:checks|call|trampoline|slot|by_torch)":)\d+')


def name_of(package: str) -> str:
    """Returns the name of the file: ``libcuda_ops.so``, or ``libmy_package.so``."""
    return f"lib{package}.so"


def write(found: Mapping[Pair, Path], path: Path, space: str = "") -> dict[Pair, str]:
    """Writes the library that registers operators, whose own libraries have to lie beside it.

    Args:
        found: where the library of each pair is. One that is not there is left out.
        path: the file to write, ``lib/libcuda_ops.so``. Processes that have an older one open keep
            it.
        space: the namespace to register them in; by default each in its own. Errors name an
            operator as its binding does.

    Returns:
        The pairs that it cannot register, and why.

    Raises:
        BuildError: there is no compiler, or it refuses; with what it said.

    Example::

        write({pair: pair.prebuilt for pair in pairs}, folder / "libcuda_ops.so")
    """
    libraries, problems = [], {}
    for pair, file in found.items():
        if not file.exists():
            continue
        try:
            libraries.append(_opened(pair, file))
        except CudaOpsError as error:
            problems[pair] = str(error)
    if libraries:
        _compile(source_of(libraries, space), path)
    else:
        path.unlink(missing_ok=True)  # of an earlier build
    return problems


def _opened(pair: Pair, file: Path) -> Library:
    if pair.kind is not Kind.NATIVE:
        raise ManifestError("a guest registers itself, or is a module of Python: open it as it is")
    return open_library(file, pair.stem, pair.namespace)


def _compile(source: str, path: Path) -> None:
    flags = [
        *commands.NATIVE_FLAGS,
        "-O0",  # it runs once
        f"-I{BUILTIN_ROOT / 'utils'}",
        "-Wl,-z,nodelete",  # the rules are in use after a dlclose too
    ]
    compile_shared(source, path, flags, ("-ltorch_cpu", "-ldl"))


def source_of(libraries: Iterable[Library], space: str = "") -> str:
    """Returns the C++ text of the library that registers the operators of others."""
    tables = _Tables(space)
    rows = [tables.library(library) for library in libraries]
    registered = f"Registered registered({tables.listed('LibraryTable', rows)});"
    lines = [
        '#include "servers/registering.h"',
        "namespace {",
        "using namespace cuda_ops::detail;",
        "using namespace cuda_ops::servers;",
        *tables.lines,
        registered,
        "}  // namespace",
    ]
    return "\n".join(lines) + "\n"


class _Tables:
    """Constants of C++, in the order in which they need each other."""

    def __init__(self, space: str = "") -> None:
        self._space = space
        self.lines: list[str] = []

    def library(self, library: Library) -> str:
        ops = []
        for op in library.ops.values():
            rules = self._struct(rules_of(op), len(op.argument_names))
            self.lines.append(f"const Rules rules_{len(self.lines)} = {rules};")
            name = self.lines[-1].split()[2]
            keys = self.listed("char* const", map(_text, op.keys))
            placed = self._placed(op)
            ops.append(f"{{{_text(op.name)}, {_text(op.schema)}, &{name}, {keys}, {placed}}}")
        pieces = _ADDRESS.sub(r"\1" + "\0", library.manifest).split("\0")
        manifest = self.listed("char* const", map(_text, pieces))
        file, namespace = _text(library.path.name), _text(self._space or library.namespace)
        return f"{{{file}, {namespace}, {manifest}, {self.listed('OpTable', ops)}}}"

    def _placed(self, op: OpSpec) -> str:
        """Returns what chooses the kernel of an operator without a tensor argument, or nulls."""
        if (position := op.device_position) is None:
            return "nullptr, nullptr"
        name, argument = f"placed_{len(self.lines)}", op.parsed.arguments[position]
        is_optional = str(schema_type(argument).endswith("?")).lower()
        values = f"{_text(op.qualname)}, {_text(argument.name)}, {position}, {is_optional}"
        self.lines.append(f"Placed {name}{{{values}}};")
        return f"&{name}, &select<{name}>"

    def listed(self, kind: str, values: Iterable[str]) -> str:
        """Returns a ``List`` of C++: an array and how long it is."""
        values = list(values)
        return f"{{{self._array(kind, values)}, {len(values)}}}"

    def _array(self, kind: str, values: Sequence[str]) -> str:
        if not values:
            return "nullptr"
        name = f"values_{len(self.lines)}"
        self.lines.append(f"const {kind} {name}[] = {{{', '.join(values)}}};")
        return name

    def _struct(self, struct: ctypes.Structure, arguments: int) -> str:
        """Returns the initializer of a struct of check_rules. A pointer's length is in the field
        behind it, a count, or it is that of the operator's arguments.
        """
        names = [name for name, *_ in struct._fields_]
        values = []
        for name, after in zip(names, [*names[1:], ""], strict=True):
            value: Any = getattr(struct, name)
            if not isinstance(value, ctypes._Pointer):
                values.append(self._value(value, arguments))
                continue
            count = getattr(struct, after) if after.endswith("count") else arguments
            elements = [
                self._value(value[i], arguments) for i in range(count if bool(value) else 0)
            ]
            values.append(self._array(STRUCTS[value._type_], elements))
        return f"{{{', '.join(values)}}}"

    def _value(self, value: Any, arguments: int) -> str:
        if isinstance(value, ctypes.Structure):
            return self._struct(value, arguments)
        if isinstance(value, float):
            return f"{'-' * (value < 0)}INFINITY" if abs(value) == float("inf") else value.hex()
        if isinstance(value, int):
            return "INT64_MIN" if value == -(2**63) else str(value)
        return "nullptr" if value is None else _text(value)


def _text(text: str | bytes) -> str:
    """Returns a literal of C++."""
    encoded = text.encode() if isinstance(text, str) else text
    shown = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}"
        for byte in encoded
    )
    return f'"{"".join(shown)}"'
