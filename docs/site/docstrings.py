"""Turns what docstrings have of reStructuredText into markdown: roles, examples, literal text."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension

_ROLE = re.compile(r":\w+:`(~?)([^`]+)`")
_EXAMPLE = re.compile(r"^Examples?::\n\n((?:(?:[ ]{4}.*)?\n)+)", re.MULTILINE)
_SESSION = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)
_LABEL = re.compile(r"\n*^(State dict|Shapes|Dtypes|Errors|Formula): ", re.MULTILINE)
_SECTION = re.compile(r"^(?:Args|Raises|Returns|Yields|Attributes):\n", re.MULTILINE)


class Docstrings(Extension):
    """Gives every object its docstring as markdown."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_package(self, *, pkg: Any, **kwargs: Any) -> None:
        self.on_object(obj=pkg)  # which Griffe leaves out


def markdown(text: str) -> str:
    """Returns a docstring with its sections as they are.

    Example::

        assert markdown(":class:`~a.B` is left") == "`B` is left"
    """
    text = _ROLE.sub(lambda m: f"`{m[2].rpartition('.')[2] if m[1] else m[2]}`", text)
    text = _EXAMPLE.sub(lambda m: f"**Example**\n\n{_fenced(m[1])}\n", f"{text}\n").rstrip()
    text = _LABEL.sub(r"\n\n- **\1**: ", text)
    text = _SESSION.sub(lambda m: _fenced(m[0]), text)
    section = _SECTION.search(text)
    prose, rest = (text[: section.start()], text[section.start() :]) if section else (text, "")
    paragraphs = (_fenced(part) if _literal(part) else part for part in prose.split("\n\n"))
    return "\n\n".join(paragraphs) + rest


def _literal(paragraph: str) -> bool:
    return paragraph.startswith(("====", "    "))


def _fenced(code: str) -> str:
    code = textwrap.dedent(code).strip("\n")
    language = "pycon" if code.startswith(">>>") else "text" if code[0] == "=" else "python"
    return f"```{language}\n{code}\n```"
