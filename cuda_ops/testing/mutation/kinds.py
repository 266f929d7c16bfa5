"""The kinds of faults: each is a function from a C++ text to the places where it can be planted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cuda_ops.build.source_text import arguments_in, closing
from cuda_ops.testing.mutation.source import Source


@dataclass(frozen=True)
class Fault:
    """A change of a text: ``new`` in place of what stands from ``start`` to ``end``."""

    start: int
    end: int
    new: str

    def planted(self, text: str) -> str:
        """Returns the text with the fault; lines keep their numbers."""
        lost = text[self.start : self.end].count("\n") - self.new.count("\n")
        return f"{text[: self.start]}{self.new}{chr(10) * lost}{text[self.end :]}"


Kind = Callable[[Source], Iterator[Fault]]

#: Binary operators stand between spaces, as clang-format leaves them.
_LEFT, _RIGHT = r"(?<=[\w)\]] )", r"(?=\s+[\w(\-!*.])"
_WIDER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_COMPARES = re.compile(rf"{_LEFT}[<>]=?{_RIGHT}|(?<=[\w)\]])[<>]=?(?=\w[^<>;{{}}]*[;)])")
_ONE = re.compile(r"(?<=[\w)\]]) [+-] 1(?=\s*(?:[\])},;:?<>=*/%]|&&|\|\|))")
_CEIL = re.compile(r"\b(?:ceil_div|div_up|divide_up|cdiv|ceiling_division)\s*\(")
_INDEX = re.compile(r"(?<=[\w\])]\[)((?!k[A-Z])[a-z]\w*)(?=\])")


def boundary(source: Source) -> Iterator[Fault]:
    """``<`` for ``<=``, a dropped ``+ 1``, an index one too large, a ceiling division cut off."""
    code = source.values
    for found in _COMPARES.finditer(code):
        yield Fault(*found.span(), _WIDER[found[0]])
    for found in _ONE.finditer(code):
        yield Fault(*found.span(), "")
    for found in _INDEX.finditer(code):
        yield Fault(*found.span(), f"{found[1]} + 1")
    for found in _CEIL.finditer(code):
        end = closing(code, found.end())
        arguments = arguments_in(source.text[found.end() : end])
        if len(arguments) == 2:
            yield Fault(found.start(), end + 1, f"(({arguments[0]}) / ({arguments[1]}))")


_OF_DIM = re.compile(r"(?<=\w)(?:[([])(\d|[a-z]\w*)(?=[)\]])")
_STRIDES = re.compile(r"\b\w*(?:stride|step|pitch)s?$")
_FACTOR = re.compile(r"(?<=[\w)\]]) \* [\w.>:\-]*(?:stride|step|pitch)\w*(?:\[\w+\]|\(\w+\))?")
_SWAPPED = (("rows", "columns"), ("rows", "cols"), ("row", "column"), ("row", "col"), ("m", "n"),
            ("M", "N"), ("height", "width"))  # fmt: skip


def stride(source: Source) -> Iterator[Fault]:
    """The stride of another dim, a stride that is left out, columns for rows."""
    code = source.values
    for found in _OF_DIM.finditer(code):
        if _STRIDES.search(code, max(0, found.start() - 40), found.start()):
            dim = found[1]
            other = str(abs(int(dim) - 1)) if dim.isdigit() else f"{dim} > 0 ? {dim} - 1 : 1"
            yield Fault(*found.span(1), other)
    for found in _FACTOR.finditer(code):
        yield Fault(*found.span(), "")
    for pair in _SWAPPED:
        places = {word: [*re.finditer(rf"\b{word}\b(?!\s*\()", code)] for word in pair}
        for word, other in (pair, pair[::-1]):
            for found in places[word] if places[other] else ():
                yield Fault(*found.span(), other)


#: Where a statement begins.
_BEGIN = r"(?:(?<=[;{})])\s*|(?<=\belse)\s+)"
_WAITS = re.compile(
    rf"{_BEGIN}((?:\w+(?:\.|->|::))*\w*(?:(?<!a)sync|wait|fence|barrier|arrive|commit)\w*"
    r"(?:<[^;<>]*>)?\([^;{}]*\));"
)


def barrier(source: Source) -> Iterator[Fault]:
    """``__syncthreads()``, a fence, or a wait of the copy engine or tensor cores removed."""
    for found in _WAITS.finditer(source.code):
        yield Fault(*found.span(1), "")


_ADDS = re.compile(rf"{_LEFT}[+-](?! 1\b(?!\.)){_RIGHT}|{_LEFT}[+-](?== )")
_MINUS = re.compile(r"(?:(?<=[(\[])|(?<=[=,?:{(*/] )|(?<=\breturn ))-(?=[\w(.])(?!=)")


def sign(source: Source) -> Iterator[Fault]:
    """``+`` for ``-``, ``-=`` for ``+=``, a minus removed."""
    for found in _ADDS.finditer(source.values):
        yield Fault(*found.span(), "-" if found[0] == "+" else "+")
    for found in _MINUS.finditer(source.values):
        yield Fault(*found.span(), "")


_TIMES = re.compile(
    rf"(?<!\bconst )(?<!\bT )(?<!\bauto )(?<!\bfloat ){_LEFT}[*/%]{_RIGHT}|{_LEFT}[*/](?== )"
)
_REAL = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?f?(?![\w.])")
_WHOLE = re.compile(
    r"(?:(?<=[*/%<>] )|(?<=[\w)\]] [+\-] ))(?:[2-9]|\d\d+)(?![\w.])|(?<![\w.])\d+(?= [*/+\-] [\w(])"
)


def arithmetic(source: Source) -> Iterator[Fault]:
    """``*`` for ``/``, or another constant."""
    for found in _TIMES.finditer(source.values):
        yield Fault(*found.span(), "*" if found[0] == "/" else "/")
    for found in _REAL.finditer(source.values):
        zero = not float(found[0].rstrip("f"))
        yield Fault(*found.span(), "1.0" if zero else f"({found[0]} * 2)")
    for found in _WHOLE.finditer(source.values):
        yield Fault(*found.span(), str(int(found[0]) + 1))


_OPPOSITE = {"&&": "||", "||": "&&", "==": "!=", "!=": "==", "max": "min", "min": "max",
             "true": "false", "false": "true", "fmaxf": "fminf", "fminf": "fmaxf",
             "fmax": "fmin", "fmin": "fmax"}  # fmt: skip
_WORD = re.compile(
    r"(?<= )(?:&&|\|\||==|!=)(?=\s)|\b(?:max|min|fmaxf?|fminf?)(?=\s*[(<])|\b(?:true|false)\b"
)
_IF = re.compile(r"\b(?:if|while)\s*\(")
_NOT = re.compile(r"(?:(?<=[(,=] )|(?<=[(,])|(?<=&& )|(?<=\|\| )|(?<=\breturn ))!(?=[\w(])")


def logic(source: Source) -> Iterator[Fault]:
    """``&&`` for ``||``, ``==`` for ``!=``, ``max`` for ``min``, a condition negated."""
    code = source.values
    for found in _WORD.finditer(code):
        yield Fault(*found.span(), _OPPOSITE[found[0]])
    for found in _NOT.finditer(code):
        yield Fault(*found.span(), "")
    for found in _IF.finditer(code):
        end = closing(code, found.end())
        if ";" not in code[found.end() : end]:
            yield Fault(found.end(), end, f"!({source.text[found.end() : end]})")


#: Not size_t, which counts arrays and vectors of the host.
_NARROWER = {"double": "float", "int64_t": "int", "uint64_t": "uint32_t"}
_WIDE = re.compile(r"\b(?:double|int64_t|uint64_t)\b(?!\s*\*)")
_SUM = re.compile(r"\b(?:C|Acc|acc_t|accum_t|float)(?=\s+\w+(?:\[\w+\])*\s*[={;])")
_ELEMENT = re.compile(r"\b(?:class|typename)\s+(T|scalar_t|Element)\b")


def dtype(source: Source) -> Iterator[Fault]:
    """A narrower type: ``float`` for ``double``, ``int`` for ``int64_t``, a sum in the type of the
    elements.
    """
    for found in _WIDE.finditer(source.code):
        yield Fault(*found.span(), _NARROWER[found[0]])
    if element := _ELEMENT.search(source.text):
        for found in _SUM.finditer(source.code):
            yield Fault(*found.span(), element[1])


_REFUSES = re.compile(
    rf"{_BEGIN}((?:(?:\w+(?:\.|->|::))*(?:refuse|check|require|expect|TORCH_CHECK|STD_TORCH_CHECK)"
    r"\w*\s*(?:<[^;<>]*>)?\([^;{}]*\))|throw\s[^;{}]*|return\s+cudaError\w+);"
)


def check(source: Source) -> Iterator[Fault]:
    """A check of the arguments removed."""
    for found in _REFUSES.finditer(source.code):
        yield Fault(*found.span(1), "")


_ASSIGNS = re.compile(
    rf"{_BEGIN}(\*?[\w:]+(?:(?:\.|->)\w+|\[[^\]\n]*\]|\(\))*\s(?:[-+*/%|&^]|<<|>>)?=\s[^;{{}}]*);"
    rf"|{_BEGIN}((?:\+\+|--)\w+|\w+(?:\+\+|--));"
)


def statement(source: Source) -> Iterator[Fault]:
    """An assignment removed."""
    for found in _ASSIGNS.finditer(source.code):
        yield Fault(*found.span(1 if found[1] else 2), "")


_LIST = re.compile(r"\bCUDA_OPS\s*\([^)]*\)\s*\{")
_CHAINED = re.compile(r"\s*\.(?!op\b|doc\b|cpu\b|cuda\b|composite\b)\w+\s*(?:<[^;()]*>)?\(")
#: Within the quotes of a schema.
_WRITES = re.compile(r"\([a-z]!\)")
_DEFAULT = re.compile(r"(?<==)(?:\d+(?:\.\d+)?(?:e-?\d+)?|True|False)(?=[,)])")


def manifest(source: Source) -> Iterator[Fault]:
    """A word of the binding dropped, such as ``.range``; another default; ``(a!)`` removed."""
    if not (block := _LIST.search(source.code)):
        return
    for found in _CHAINED.finditer(source.code, block.end()):
        yield Fault(found.start(), closing(source.code, found.end()) + 1, "")
    for found in re.finditer(r"\.op\s*\(", source.code[block.end() :]):
        start = block.end() + found.end()
        end = closing(source.code, start)
        for word in _WRITES.finditer(source.text, start, end):
            yield Fault(*word.span(), "")
        for word in _DEFAULT.finditer(source.text, start, end):
            yield Fault(*word.span(), _another_default(word[0]))


def _another_default(value: str) -> str:
    if value in ("True", "False"):
        return "False" if value == "True" else "True"
    return str(int(value) + 1) if value.isdigit() else f"{float(value) * 3:g}"


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        boundary, stride, barrier, sign, arithmetic, logic, dtype, check, statement, manifest,
    )
}  # fmt: skip
