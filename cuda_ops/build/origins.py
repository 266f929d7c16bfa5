"""Where the text of a file was written, such as a notebook's cell: messages name that place.

Compilers name the file that they read. A ``#line`` in it would do too, and would make a rerun of
the same cell, which has another number then, another text to build; it would also lead a profiler
to a file that is not there. So files hold their text alone, and messages are rewritten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Origin:
    """A place that a text was written at."""

    #: A file, or a cell as IPython calls it: ``In[3]``.
    label: str
    #: The line of the text's first one.
    line: int = 1


#: By file: the place, and the text from there, which an editor may replace in a kept file.
_origins: dict[Path, tuple[Origin, bytes]] = {}


def remember(path: Path, origin: Origin) -> None:
    """Lets messages about a file name the place of the text that it has now."""
    _origins[path] = origin, path.read_bytes()


def forget(path: Path) -> None:
    """Lets messages about a file name the file again."""
    _origins.pop(path, None)


def shown(text: str) -> str:
    """Returns a message in which places in remembered files are those of their text:
    ``In[3]:7:5: error`` for ``silu.cpp:6:5: error``, and ``In[3](7): error`` for nvcc's
    ``silu.cu(6): error``.
    """
    for path, (origin, known) in tuple(_origins.items()):
        if str(path) not in text or (path.is_file() and path.read_bytes() != known):
            continue

        def place(found: re.Match[str], origin: Origin = origin) -> str:
            if found[2] is None:
                return origin.label
            return f"{origin.label}{found[1]}{int(found[2]) + origin.line - 1}"

        text = re.sub(rf"{re.escape(str(path))}(?:([:(])(\d+)\b)?", place, text)
    return text
