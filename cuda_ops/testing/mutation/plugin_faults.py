"""Faults in the gradient that a pair's plugin writes in Python."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from cuda_ops.testing.mutation.kinds import Fault

#: The hooks whose functions are formulas of derivatives, and what such functions are called.
_FORMULAS = re.compile(r"cuda_ops_autograd|cuda_ops_jvp|backward\w*|\w+_backward|setup_context|jvp")
_OPPOSITE = {"+": "-", "-": "+", "*": "/", "/": "*", "==": "!=", "!=": "==", "and": "or",
             "or": "and", ">": ">=", "<": "<=", "True": "False", "False": "True"}  # fmt: skip
_UNARY = ("not", "-")


def gradient(text: str) -> Iterator[Fault]:
    """Another operator, a minus or ``not`` removed, in the functions of a gradient."""
    starts = [0]
    for one in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(one))
    spans = [
        (node.body[0].lineno, node.end_lineno or 0)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and _FORMULAS.fullmatch(node.name)
    ]
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word, (line, column) = token.string, token.start
        is_code = token.type in (tokenize.OP, tokenize.NAME)
        if is_code and any(first <= line <= last for first, last in spans):
            at = starts[line - 1] + column
            is_unary = word in _UNARY and not re.fullmatch(r"[\w)\]]+", before)
            is_unary |= word == "not" or (word == "-" and before in ("return", "in", "and", "or"))
            if is_unary:
                yield Fault(at, at + len(word), "")
            elif word in _OPPOSITE and (word.isalpha() or re.fullmatch(r"[\w)\]]+", before)):
                yield Fault(at, at + len(word), _OPPOSITE[word])
        if word.strip() and token.type != tokenize.COMMENT:
            before = word
