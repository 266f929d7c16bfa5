"""The text of a guest as functions, statements and registrations.

Regular expressions over a text without comments, not a parser of C++: what they do not know is left
for the author, and said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cuda_ops.build.discovery import Pair
from cuda_ops.build.source_text import arguments_in, closing, line_at, masked, text_of

#: A launch of a kernel, up to the bracket of its arguments.
LAUNCH = re.compile(
    r"(?P<kernel>[A-Za-z_][\w:]*)\s*(?P<template><[^;{}()]*>)?\s*<<<(?P<config>.*?)>>>\s*\(", re.DOTALL
)
_FUNCTION = re.compile(r"(?P<head>.*?)\b(?P<name>[A-Za-z_]\w*)\s*\((?P<params>.*)\)[^()]*", re.DOTALL)
_MACRO = re.compile(r"#\s*define\s+(\w+)\(([^)]*)\)(.*)", re.DOTALL)
_INCLUDE = re.compile(r'#\s*include\s*(?:"([^"\n]+)"|<([^>\n]+)>)')
_CONTROL = re.compile(r"(?:if(?:\s+constexpr)?|for|while|switch)\b\s*\(|(?:else|do)\b")
#: What is no type, and stands in front of one.
_SPECIFIERS = re.compile(r"\b(?:static|inline|extern|constexpr|__host__|__forceinline__|virtual)\b")


@dataclass(frozen=True)
class Source:
    """A file: its text, and the same with spaces for comments and for what quotes hold."""

    path: Path
    text: str

    @cached_property
    def mask(self) -> str:
        return masked(self.text)

    @cached_property
    def code(self) -> str:
        """The text with spaces for its comments alone."""
        return masked(self.text, quotes=False)

    def line(self, at: int) -> int:
        return line_at(self.text, at)


@dataclass(frozen=True)
class Place:
    """Where something stands in a guest: ``relu.cu:12``."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


@dataclass(frozen=True)
class Statement:
    """A statement with its semicolon or block, as written but for comments."""

    text: str
    place: Place


@dataclass(frozen=True)
class Parameter:
    type: str
    name: str
    default: str = ""

    @property
    def base(self) -> str:
        """The type without const, reference and torch's namespaces."""
        return base_type(self.type)


@dataclass(frozen=True)
class Item:
    """A piece of a file outside of functions, or a function."""

    #: ``"directive"``, ``"statement"``, ``"open"``, ``"close"`` or ``"block"``.
    kind: str
    source: Source
    start: int
    end: int
    #: Where the block's inside begins.
    inside: int = 0

    @property
    def code(self) -> str:
        return self.source.code[self.start : self.end]

    @property
    def body(self) -> str:
        return self.source.code[self.inside : self.end].rstrip().removesuffix(";").rstrip()[:-1]

    @property
    def place(self) -> Place:
        return Place(self.source.path, self.source.line(self.start))

    @cached_property
    def function(self) -> Function | None:
        """The function that the block defines."""
        if self.kind != "block":
            return None
        head = self.source.mask[self.start : self.inside - 1]
        if re.match(r"\s*(?:typedef\s+)?(?:struct|class|enum|union)\b", head) and "(" not in head:
            return None
        at = head.rfind(")")
        opened = _opening(head, at)
        found = re.search(r"([A-Za-z_]\w*)\s*$", head[:opened]) if at >= 0 else None
        if found is None:
            return None
        params = self.source.code[self.start + opened + 1 : self.start + at]
        return Function(found[1], head[: found.start()].strip(), params, self)


def _opening(text: str, at: int) -> int:
    """Returns where the bracket opens that closes at ``at``."""
    depth = 0
    for place in range(at, -1, -1):
        depth += (text[place] == ")") - (text[place] == "(")
        if depth == 0:
            return place
    return 0


@dataclass(frozen=True)
class Function:
    name: str
    head: str
    params_text: str
    item: Item

    @property
    def is_kernel(self) -> bool:
        return "__global__" in self.head

    @property
    def is_device(self) -> bool:
        return "__device__" in self.head

    @property
    def is_template(self) -> bool:
        return self.head.startswith("template")

    @property
    def returns(self) -> str:
        return " ".join(_SPECIFIERS.sub("", self.head).split())

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(map(parameter, arguments_in(self.params_text)))

    @property
    def launches(self) -> bool:
        return LAUNCH.search(self.item.body) is not None

    @property
    def has_tensors(self) -> bool:
        types = (self.returns, *(one.type for one in self.parameters))
        return any("Tensor" in one and "Accessor" not in one for one in types)

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        item = self.item
        end = item.inside + len(item.body)
        return tuple(statements(item.source, item.inside, end))


def parameter(text: str) -> Parameter:
    """Reads ``const torch::Tensor& x = y``."""
    declared, _, default = text.partition("=")
    found = re.fullmatch(r"(.*?)(\w+)\s*(\[\s*\d*\s*\])?", declared.strip(), re.DOTALL)
    if found is None or not found[1].strip():
        return Parameter(declared.strip(), "", default.strip())
    kind = " ".join(found[1].split()) + ("*" if found[3] else "")
    return Parameter(kind, found[2], default.strip())


def base_type(text: str) -> str:
    """Returns a type without const, reference and torch's namespaces."""
    text = re.sub(r"\b(?:torch|at|c10|stable|headeronly|std)::", "", text)
    text = re.sub(r"\b(?:const|__restrict__|__restrict)\b", "", text).replace("&", "")
    return re.sub(r"\s+", " ", text).replace(" *", "*").replace(" <", "<").replace(" >", ">").strip()


def items(source: Source) -> Iterator[Item]:
    """Yields what a file consists of outside of functions."""
    mask, at = source.mask, 0
    while True:
        while at < len(mask) and mask[at].isspace():
            at += 1
        if at >= len(mask):
            return
        start = at
        if mask[at] == "#":
            at = _directive_end(mask, at)
            yield Item("directive", source, start, at)
            continue
        if mask[at] == "}":
            at += 1
            yield Item("close", source, start, at)
            continue
        while at < len(mask) and mask[at] not in ";{}":
            at = closing(mask, at + 1) + 1 if mask[at] in "([" else at + 1
        if at >= len(mask) or mask[at] in ";}":
            at += at < len(mask) and mask[at] == ";"
            yield Item("statement", source, start, at)
            continue
        head, inside = mask[start:at], at + 1
        if re.fullmatch(r'\s*(?:inline\s+)?namespace\b[\w:\s]*|\s*extern\s*"\s*"\s*', head):
            at = inside
            yield Item("open", source, start, at)
            continue
        at = closing(mask, inside) + 1
        tail = re.compile(r"[^;{}()#]*;").match(mask, at)
        if ")" not in head or "=" in head:  # a struct, or a table: up to its semicolon
            at = tail.end() if tail else at
        yield Item("block", source, start, at, inside)


def _directive_end(mask: str, at: int) -> int:
    while (end := mask.find("\n", at)) >= 0:
        if mask[at:end].rstrip().endswith("\\"):
            at = end + 1
        else:
            return end
    return len(mask)


def statements(source: Source, start: int, end: int) -> Iterator[Statement]:
    """Yields the statements between two places."""
    mask, at = source.mask, start
    while True:
        while at < end and (mask[at].isspace() or mask[at] == ";"):
            at += 1
        if at >= end:
            return
        begin, at = at, _statement_end(mask, at, end)
        yield Statement(source.code[begin:at], Place(source.path, source.line(begin)))


def _statement_end(mask: str, at: int, end: int) -> int:
    if mask[at] == "#":
        return min(_directive_end(mask, at), end)
    if mask[at] == "{":
        return min(closing(mask, at + 1) + 1, end)
    if control := _CONTROL.match(mask, at):
        at = control.end()
        if control[0].endswith("("):
            at = closing(mask, at) + 1
        at = _statement_end(mask, _skipped(mask, at, end), end)
        after = _skipped(mask, at, end)
        if re.compile(r"else\b").match(mask, after, end):
            return _statement_end(mask, after, end)
        return at
    while at < end and mask[at] != ";":
        at = closing(mask, at + 1) + 1 if mask[at] in "([{" else at + 1
    return min(at + 1, end)


def _skipped(mask: str, at: int, end: int) -> int:
    while at < end and mask[at].isspace():
        at += 1
    return at


def split(text: str, place: Place) -> list[Statement]:
    """Splits a text that stands at a place, such as a block without its braces."""
    source = Source(place.path, text)
    found = statements(source, 0, len(text))
    return [Statement(one.text, Place(one.place.path, place.line + one.place.line - 1)) for one in found]


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
        fitting = [one for one in found if arguments in (-1, len(one.parameters))]
        return (fitting or [None])[0]

    def kernel(self, name: str) -> Function | None:
        found = self.functions.get(name.rpartition("::")[2], ())
        return next((one for one in found if one.is_kernel), None)

    def expanded(self, statement: Statement) -> list[Statement]:
        """Replaces a call of the guest's own macro of checks by what it stands for."""
        call = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*;?\s*", statement.text, re.DOTALL)
        if call is None or call[1] not in self.macros:
            return [statement]
        names, body = self.macros[call[1]]
        given = arguments_in(call[2])
        if not re.search(r"CHECK|ASSERT", body) or len(given) != len(names):
            return [statement]
        body = re.sub(r"^do\s*\{(.*)\}\s*while\s*\(\s*(?:0|false)\s*\)$", r"\1", body, flags=re.DOTALL)
        for name, value in zip(names, given, strict=True):
            body = re.sub(rf"#\s*{name}\b", lambda _, v=value: f'"{v}"', body)
            body = re.sub(rf"\b{name}\b", lambda _, v=value: v, body)
        return [
            one for part in split(" ".join(body.split()), statement.place)
            for one in self.expanded(Statement(part.text, statement.place))
        ]  # fmt: skip

    @cached_property
    def exports(self) -> list[Export]:
        """What ``m.def`` and ``m.impl`` register, in order; lambdas have no function."""
        found: dict[str, Export] = {}
        for item in self.items:
            if (function := item.function) is None:
                continue
            name = function.name
            if name != "PYBIND11_MODULE" and not re.search(r"TORCH_LIBRARY", name):
                continue
            key = function.params_text.split(",")[1].strip() if "IMPL" in name else ""
            for statement in function.statements:
                self._registered(statement, name == "PYBIND11_MODULE", key, found)
        return list(found.values())

    def _registered(
        self, statement: Statement, is_pybind: bool, key: str, found: dict[str, Export]
    ) -> None:
        for match in re.finditer(r"\.\s*(def|impl)\s*\(", statement.text):
            inside = statement.text[match.end() : _bracket(statement.text, match.end())]
            given = arguments_in(inside)
            if not given or not given[0].lstrip().startswith(('"', "R\"", "TORCH_SELECTIVE")):
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
            doc = next((string_in(one) for one in given[1:] if one.lstrip().startswith(('"', "R\""))), "")
            arguments = tuple(
                (arg[1], arg[2].strip())
                for one in given[1:]
                if (arg := re.match(r'\s*(?:\w+::)*arg\s*\(\s*"(\w+)"\s*\)\s*=?(.*)', one, re.DOTALL))
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
    """Returns what neighbouring string literals say."""
    raw = re.search(r'R"(\w*)\((.*?)\)\1"', text, re.DOTALL)
    if raw:
        return raw[2].strip()
    return "".join(part.replace('\\"', '"') for part in re.findall(r'"((?:\\.|[^"\\\n])*)"', text))


def _function_name(text: str) -> str:
    found = re.fullmatch(
        r"\s*(?:TORCH_BOX|TORCH_FN)?\s*\(?\s*&?\s*(?:\w+::)*([A-Za-z_]\w*)\s*\)?\s*", text
    ) or re.fullmatch(r"\s*[\w:]*(?:dispatch|CppFunction|makeFromUnboxedFunction)\b.*?&?\s*(\w+)\s*\)+\s*", text)
    return found[1] if found else ""
