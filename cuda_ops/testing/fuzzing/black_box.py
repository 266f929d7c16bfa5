"""What a process that calls is doing, in memory that outlives it, for its parent to read."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_HEAD = struct.Struct("<6QIB")
_SIZE = 1 << 16
_IDLE, _RUNNING, _MAKING = range(3)


class BlackBox:
    """Counts of calls by what became of them, and the call that runs."""

    STATUSES = ("returned", "refused", "unmade", "large", "finding")

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._counts = [0] * len(self.STATUSES)
        self._begun = 0

    def make(self, line: str) -> None:
        """Notes the call whose arguments are about to be made."""
        self._note(line, _MAKING)

    def begin(self, line: str) -> None:
        """Notes the call that is about to run."""
        self._begun += 1
        self._note(line, _RUNNING)

    def end(self) -> None:
        """Notes that the call has come back."""
        self._write(0, _IDLE)

    def _note(self, line: str, state: int) -> None:
        text = line.encode(errors="replace")[: _SIZE - _HEAD.size]
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        self._write(len(text), state)

    def count(self, status: str) -> None:
        """Counts what became of a call."""
        self._counts[self.STATUSES.index(status)] += 1
        self._write(0, _IDLE)

    def _write(self, length: int, state: int) -> None:
        _HEAD.pack_into(self._memory, 0, self._begun, *self._counts, length, state)

    def read(self) -> tuple[int, dict[str, int], str]:
        """Returns how many calls have begun, what became of them, and the one that runs or whose
        arguments are being made, if any.
        """
        begun, *counts, length, state = _HEAD.unpack_from(self._memory)
        line = self._memory[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        return begun, dict(zip(self.STATUSES, counts, strict=True)), line if state else ""

    @property
    def is_making(self) -> bool:
        """Whether arguments are being made, by torch alone."""
        return bool(_HEAD.unpack_from(self._memory)[-1] == _MAKING)
