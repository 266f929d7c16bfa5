"""Turns GitHub's markdown, in which the documents are written, into that of MkDocs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from pages import CODE, LINK, REPO, page_of

_COMMENT = re.compile(r"^([ \t]*)<!-- (.+?) -->\n", re.MULTILINE)
_FENCE_BELOW = re.compile(r"^([ \t]*)<!-- (.+?) -->\n[ \t]*```(\w*)$", re.MULTILINE)
_KIND = re.compile(r"^\*\[Documents\]\(\S+\) / \S+\*\n", re.MULTILINE)


class _Lists(Extension):
    """Lists in lists are indented by two spaces, not by four."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # as it is called
        md.tab_length = 2


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(_Lists())
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = REPO / page.file.src_uri
    text = _KIND.sub("", markdown)
    text = _COMMENT.sub("", _FENCE_BELOW.sub(_titled, text))
    if source.name == "errors.md" and source.parent.name == "docs":
        text = _as_headings(text)
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [_with_pages(text[end : code.start()], source), code[0]]
        end = code.end()
    parts.append(_with_pages(text[end:], source))
    return re.sub(r"^\|.*$", _unescaped, "".join(parts), flags=re.MULTILINE)


def _titled(match: re.Match[str]) -> str:
    """Puts what a comment says of a block into the block's title."""
    indent, said, language = match.groups()
    known = re.fullmatch(r"(from|write|edit|not run:) (.+)", said)
    if known is None:
        return f"{indent}```{language}"
    title = f"not run by the tests: {known[2]}" if known[1] == "not run:" else known[2]
    return f'{indent}```{language or "text"} title="{title}"'


def _with_pages(text: str, source: Path) -> str:
    """Leads links to files and folders to the pages that show them."""

    def led(match: re.Match[str]) -> str:
        file, hash_, anchor = match[0].partition("#")
        if not file or re.match(r"[a-z]+:", file):
            return match[0]
        shown = page_of((source.parent / file).resolve())
        if shown is None:
            return match[0]
        return Path(os.path.relpath(shown, source.parent)).as_posix() + hash_ + anchor

    return LINK.sub(led, text.replace("][", "]\\["))  # x[i][j] leads nowhere


def _unescaped(row: re.Match[str]) -> str:
    """Takes the backslash from a bar in the code of a table, which GitHub wants there."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])


def _as_headings(text: str) -> str:
    """Makes a heading of each message in a table, so that the search finds it."""
    row = re.compile(r"^\| (`.+?`) \| (.+) \|$", re.MULTILINE)
    head, table, rest = text.partition("| message contains |")
    tables = re.sub(r"^\| message contains \|.*\n\|[-|]+\n", "", table + rest, flags=re.MULTILINE)
    return head + row.sub(lambda m: f"### {m[1]}\n\n{m[2][0].upper()}{m[2][1:]}.\n", tables)
