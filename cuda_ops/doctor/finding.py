"""What is wrong, why that matters, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``broken``: something does not work. ``warning``: it works, but will cause trouble. ``note``: it
#: costs nothing, or matters to few.
Level = Literal["broken", "warning", "note"]
LEVELS: tuple[Level, ...] = ("broken", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    #: A name that stays, for scripts: ``"driver-too-old"``.
    fault: str
    level: Level
    what: str
    why: str = ""
    #: The command that mends it, or what to do where no command does.
    command: str = ""
    #: The operators or plugins that it is about.
    about: tuple[str, ...] = ()
