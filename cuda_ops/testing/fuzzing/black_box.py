"""What a process that calls is doing, in memory that outlives it, for its parent to read."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_HEAD = struct.Struct("<6QIB")
_SIZE = 1 << 16


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

    def begin(self, line: str) -> None:
        """Notes the call that is about to run."""
        text = line.encode(errors="replace")[: _SIZE - _HEAD.size]
        self._begun += 1
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        self._write(len(text), running=True)

    def end(self) -> None:
        """Notes that the call has come back."""
        self._write(0, running=False)

    def count(self, status: str) -> None:
        """Counts what became of a call."""
        self._counts[self.STATUSES.index(status)] += 1
        self._write(0, running=False)

    def _write(self, length: int, running: bool) -> None:
        _HEAD.pack_into(self._memory, 0, self._begun, *self._counts, length, running)

    def read(self) -> tuple[int, dict[str, int], str]:
        """Returns how many calls have begun, what became of them, and the one that runs, if any."""
        begun, *counts, length, running = _HEAD.unpack_from(self._memory)
        line = self._memory[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        return begun, dict(zip(self.STATUSES, counts, strict=True)), line if running else ""
