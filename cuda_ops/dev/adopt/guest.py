"""The files of a guest: its functions, its macros and what it registers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cuda_ops.build.discovery import Pair
from cuda_ops.build.source_text import arguments_in, closing, masked, text_of
from cuda_ops.dev.adopt.cxx import Function, Item, Source, Statement, items, split
from cuda_ops.dev.adopt.notes import Note, Place

_MACRO = re.compile(r"#\s*define\s+(\w+)\(([^)]*)\)(.*)", re.DOTALL)
#: What macros of checks have in them.
_CHECKS = "CHECK|ASSERT|AT_ERROR|throw"
#: Headers of torch, as they are included.
OF_TORCH = re.compile(r"^(?:torch|ATen|c10|pybind11|THC\w*)/|^Python\.h$")
_SPACE = re.compile(r"namespace\s+([\w:]+)\s*\{")
_INCLUDE = re.compile(r'#\s*include\s*(?:"([^"\n]+)"|<([^>\n]+)>)')


@dataclass(frozen=True)
class Export:
    """A function that a guest offers."""

    name: str
    place: Place
    #: The schema that it is registered with; empty for pybind11.
    schema: str = ""
    doc: str = ""
    #: The names of ``py::arg``, and their defaults.
    arguments: tuple[tuple[str, str], ...] = ()
    #: The C++ function of each device, ``"any"`` where one serves all.
    functions: dict[str, str] = field(default_factory=dict)


class Guest:
    """The files of a guest, read once."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.sources = [Source(path, text_of(path)) for path in pair.own_sources]
        self.headers: dict[str, Path] = {}
        known = {path.resolve() for path in pair.own_sources}
        waiting, dirs = list(self.sources), pair.include_dirs
        #: Own headers, whose kernels and macros count.
        self.included: list[Source] = []
        while waiting:
            one = waiting.pop(0)
            for quoted, angled in _INCLUDE.findall(one.text):
                name = quoted or angled
                places = [one.path.parent, *dirs] if quoted else list(dirs)
                path = next((d / name for d in places if (d / name).is_file()), None)
                if path is None or not path.resolve().is_relative_to(pair.root.resolve()):
                    continue
                self.headers[name] = path.resolve()
                if path.resolve() not in known:
                    known.add(path.resolve())
                    source = Source(path, text_of(path))
                    self.included.append(source)
                    waiting.append(source)

    @property
    def files(self) -> str:
        """Its files, as a sentence names them."""
        *first, last = (path.name for path in self.pair.own_sources)
        return f"{', '.join(first)} and {last}" if first else last

    @cached_property
    def items(self) -> list[Item]:
        return [item for source in (*self.sources, *self.included) for item in items(source)]

    @property
    def system_includes(self) -> list[str]:
        """Returns what its C++ files include beside torch's headers and its own."""
        lines = (
            " ".join(item.code.split())
            for item in self.items
            if item.source in self.sources and item.source.path.suffix != ".cu"
            if (found := _INCLUDE.match(item.code)) and found[2] not in (None, *self.headers)
            if not OF_TORCH.match(found[2])
        )
        return list(dict.fromkeys(lines))

    def spaces_in_headers(self) -> list[str]:
        """Returns the namespaces of its own headers, which a draft includes as they are."""
        opened = (i.code for i in self.items if i.kind == "open" and i.source in self.included)
        return list(dict.fromkeys(_SPACE.findall(" ".join(opened))))

    def unqualified(self, text: str) -> str:
        """Takes the guest's own namespaces away: a draft has all that it keeps in one."""
        opened = (item.code for item in self.items if item.kind == "open")
        for space in _SPACE.findall(" ".join(opened)):
            text = re.sub(rf"\b{space}::(?=\w)", "", text)
        return text

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        found: dict[str, list[Function]] = {}
        for item in self.items:
            if item.function is not None:
                found.setdefault(item.function.name, []).append(item.function)
        return found

    @cached_property
    def macros(self) -> dict[str, tuple[list[str], str]]:
        """The macros that take arguments: the names of these, and the text."""
        found = {}
        for item in self.items:
            if item.kind == "directive" and (match := _MACRO.match(item.code)):
                body = match[3].replace("\\\n", " \n").strip()
                found[match[1]] = ([one.strip() for one in match[2].split(",")], body)
        return found

    def function(self, name: str, arguments: int = -1) -> Function | None:
        """Returns the definition of a host function; of several the one with so many arguments."""
        found = [
            one for one in self.functions.get(name.rpartition("::")[2], ())
            if not one.is_kernel and not (one.is_device and "__host__" not in one.head)
        ]  # fmt: skip
        return next((one for one in found if arguments in (-1, len(one.parameters))), None)

    def kernel(self, name: str) -> Function | None:
        found = self.functions.get(name.rpartition("::")[2], ())
        return next((one for one in found if one.is_kernel), None)

    def checks_launches(self, text: str) -> bool:
        """Says whether a statement is a macro of the guest's own that asks how a launch went."""
        call = re.fullmatch(r"\s*(\w+)\s*\(\s*\)\s*;?\s*", text)
        return call is not None and "cudaGetLastError" in self.macros.get(call[1], ([], ""))[1]

    def expanded(self, statement: Statement, of: str = _CHECKS) -> list[Statement]:
        """Replaces calls of the guest's own macros, of checks or what else is asked for, by what
        they stand for. They may have no semicolon.
        """
        mask = masked(statement.text)
        start = re.match(r"\s*(\w+)\s*\(", mask)
        if start is None or start[1] not in self.macros:
            return [statement]
        end = closing(mask, start.end())
        if behind := re.compile(r"\s*(?=[A-Za-z_#])").match(mask, end + 1):
            line = statement.place.line + mask.count("\n", 0, behind.end())
            rest = Statement(statement.text[behind.end() :], Place(statement.place.path, line))
            first = Statement(statement.text[: end + 1] + ";", statement.place)
            return [*self.expanded(first, of), *self.expanded(rest, of)]
        call = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*;?\s*", statement.text, re.DOTALL)
        if call is None:
            return [statement]
        names, body = self.macros[call[1]]
        given = arguments_in(call[2])
        if not re.search(of, body) or len(given) != len(names):
            return [statement]
        body = re.sub(
            r"^do\s*\{(.*)\}\s*while\s*\(\s*(?:0|false)\s*\)$", r"\1", body, flags=re.DOTALL
        )
        for name, value in zip(names, given, strict=True):
            quoted, plain = f'"{value}"', value
            body = re.sub(rf"(?<!#)#\s*{re.escape(name)}\b", quoted.replace("\\", r"\\"), body)
            body = re.sub(rf"\b{re.escape(name)}\b", plain.replace("\\", r"\\"), body)
        for quoting, (_, text) in self.macros.items():  # STRINGIFY(x), where that is #x
            if re.fullmatch(r"#\s*\w+", text):
                body = re.sub(rf"\b{quoting}\(\s*(\w+)\s*\)", r'"\1"', body)
        return [
            one for part in split(" ".join(body.split()), statement.place)
            for one in self.expanded(Statement(part.text, statement.place), of)
        ]  # fmt: skip

    @cached_property
    def exports(self) -> list[Export]:
        """What ``m.def`` and ``m.impl`` register, in order; lambdas have no function."""
        found: dict[str, Export] = {}
        self.unread: list[Note] = []
        for item in self.items:
            if (function := item.function) is None:
                continue
            name = function.name
            if name != "PYBIND11_MODULE" and not re.search(r"TORCH_LIBRARY", name):
                continue
            key = "".join(function.params_text.split(",")[1:2]).strip() if "IMPL" in name else ""
            for statement in function.statements:
                for one in self.expanded(statement, r"\.\s*def\s*\("):
                    if not re.search(r"\.\s*(?:def|impl|doc|attr)\s*\(|^\s*#", one.text):
                        text = (
                            f"{' '.join(one.text.split())}: not read; write m.def(name, &function)"
                        )
                        self.unread.append(Note(one.place, text))
                    self._registered(one, name == "PYBIND11_MODULE", key, found)
        return list(found.values())

    def _registered(
        self, statement: Statement, is_pybind: bool, key: str, found: dict[str, Export]
    ) -> None:
        for match in re.finditer(r"\.\s*(def|impl)\s*\(", statement.text):
            inside = statement.text[match.end() : _bracket(statement.text, match.end())]
            given = arguments_in(inside)
            if not given or not given[0].lstrip().startswith(('"', 'R"', "TORCH_SELECTIVE")):
                continue
            text = string_in(given[0])
            name = re.split(r"[(]", text)[0].strip().rpartition("::")[2]
            functions = [_function_name(one) for one in given[1:]]
            called = next(filter(None, functions), "")
            place = Place(statement.place.path, statement.place.line
                          + statement.text.count("\n", 0, match.start()))  # fmt: skip
            if match[1] == "impl":
                for one in given[1:]:
                    if dispatched := re.search(r"DispatchKey::(\w+)", one):
                        key = dispatched[1]
                export = found.setdefault(name, Export(name, place))
                device = {"CPU": "cpu", "CUDA": "cuda"}.get(key, f"key {key}" if key else "any")
                if key.startswith("Composite"):
                    device = "any"
                export.functions[device] = called
                continue
            doc = next(
                (string_in(one) for one in given[1:] if one.lstrip().startswith(('"', 'R"'))), ""
            )
            arguments = tuple(
                (arg[1], arg[2].strip())
                for one in given[1:]
                if (
                    arg := re.match(
                        r'\s*(?:\w+::)*arg\s*\(\s*"(\w+)"\s*\)\s*=?(.*)', one, re.DOTALL
                    )
                )
            )
            made = Export(name, place, "" if is_pybind else text, doc, arguments)
            old = found.get(name)
            if old is not None:
                made.functions.update(old.functions)
            if called or is_pybind:
                made.functions["any"] = called
            found[name] = made


def _bracket(text: str, start: int) -> int:
    return closing(masked(text), start)


def string_in(text: str) -> str:
    """Returns what neighboring string literals say."""
    raw = re.search(r'R"(\w*)\((.*?)\)\1"', text, re.DOTALL)
    if raw:
        return raw[2].strip()
    return "".join(part.replace('\\"', '"') for part in re.findall(r'"((?:\\.|[^"\\\n])*)"', text))


#: What stands around the name of a function that is registered.
_WRAPPED = (
    re.compile(r"(?:TORCH_BOX|TORCH_FN)?\s*\(?\s*&?\s*(?:\w+::)*([A-Za-z_]\w*)\s*\)?"),
    re.compile(
        r"[\w:]*(?:dispatch|CppFunction|makeFromUnboxedFunction|wrap_pybind_function)\b"
        r".*?&?\s*(\w+)\s*\)+"
    ),
)


def _function_name(text: str) -> str:
    found = (pattern.fullmatch(text.strip()) for pattern in _WRAPPED)
    return next((one[1] for one in found if one is not None), "")
