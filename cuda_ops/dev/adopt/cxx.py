"""The text of a source as functions and statements.

Regular expressions over a text without comments, not a parser of C++: what they do not know is left
for the author, and said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cuda_ops.build.source_text import arguments_in, closing, line_at, masked
from cuda_ops.dev.adopt.notes import Place

#: A launch of a kernel, up to the bracket of its arguments.
LAUNCH = re.compile(
    r"(?P<kernel>[A-Za-z_][\w:]*)\s*(?P<template><[^;{}()]*>)?\s*<<<(?P<config>.*?)>>>\s*\(",
    re.DOTALL,
)
_FUNCTION = re.compile(
    r"(?P<head>.*?)\b(?P<name>[A-Za-z_]\w*)\s*\((?P<params>.*)\)[^()]*", re.DOTALL
)
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
class Statement:
    """A statement with its semicolon or block, as written but for comments."""

    text: str
    place: Place


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function."""

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
    """A function that a file defines."""

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
    return (
        re.sub(r"\s+", " ", text).replace(" *", "*").replace(" <", "<").replace(" >", ">").strip()
    )


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
    if at >= end:
        return end
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
    return [
        Statement(one.text, Place(one.place.path, place.line + one.place.line - 1)) for one in found
    ]
