"""Which places of a C++ text hold code that a fault can change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from cuda_ops.build.source_text import closing, masked

_RAW_STRING = re.compile(r'R"(\w*)\(.*?\)\1"', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
_TEMPLATE = re.compile(r"\btemplate\s*<")
#: What says something to the compiler alone. PTX stands in strings.
_CALLS = re.compile(r"\b(?:static_assert|__launch_bounds__|asm(?:\s+volatile)?|alignas)\s*\(")
_NAMES = re.compile(r"\b(?:using|typedef|friend)\b[^;]*;|\boperator\s*[^\s\w(]+")
#: A number with a name, such as a block's threads: another one makes a kernel slower or faster.
_TUNING = re.compile(
    r"\b(?:static\s+|inline\s+)*constexpr\s+[\w:]+\s+k[A-Z]\w*\s*="
    r"(?:[-\d\s*+/<>()|=,xXa-fA-FuUlL]|\bu?int(?:\d+_t)?\b|\bk[A-Z]\w*(?=\s*=))*;"
)
#: What another file defines: another type would only fail to link.
_DECLARED = re.compile(r"^[\w:][\w:<>&* ]* [&*]*\w+\([^(){};]*\);", re.MULTILINE)
_ARGUMENTS = re.compile(r"(?<=\w)<(?!<)((?:(?!&&|\|\|)[^<>;{}])*)>(?!>)")


@dataclass(frozen=True)
class Source:
    """A text, and the same with spaces for what no fault may change: all places stay."""

    text: str

    @cached_property
    def code(self) -> str:
        """Without comments, what stands in quotes, directives, lists of template parameters,
        declarations, ``static_assert``, ``asm`` and numbers that only tune.
        """
        code = masked(_RAW_STRING.sub(_blank, self.text))
        for pattern in (_DIRECTIVE, _NAMES, _TUNING, _DECLARED):
            code = pattern.sub(_blank, code)
        for pattern, end_of in ((_TEMPLATE, _end_of_parameters), (_CALLS, closing)):
            at = 0
            while found := pattern.search(code, at):
                at = end_of(code, found.end()) + 1
                code = code[: found.start()] + _spaces(code[found.start() : at]) + code[at:]
        return code

    @cached_property
    def values(self) -> str:
        """The code without template arguments too, so that what is left of ``<`` compares."""
        code, before = self.code, ""
        while code != before:
            code, before = _ARGUMENTS.sub(_blank, code), code
        return code


def _end_of_parameters(code: str, start: int) -> int:
    depth = 1
    for at in range(start, len(code)):
        depth += (code[at] == "<") - (code[at] == ">" and code[at - 1] != "-")
        if depth == 0:
            return at
    return len(code)


def _blank(found: re.Match[str]) -> str:
    return _spaces(found[0])


def _spaces(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)
