"""Where things stand in a guest, and what is left of it for the author."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where something stands in a guest: ``relu.cu:12``."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


@dataclass(frozen=True)
class Note:
    """What is left for the author, and where in the guest it comes from."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class UnknownError(Exception):
    """Something that is left for the author."""

    def __init__(self, place: Place, text: str) -> None:
        super().__init__(text)
        self.note = Note(place, text)
