"""Numbers that the ranks of one host show each other, in memory that they share."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

try:
    import fcntl
except ImportError:  # Windows, where ranks do without a board
    fcntl = None  # type: ignore[assignment]  # mypy knows it as a module alone

#: Low bits of each word, which say of what exchange it is. A reader so knows each word alone,
#: whatever the order in which a machine lets it see them.
_TAG_BITS = 20
_TAGS = (1 << _TAG_BITS) - 1  # as many, and the mask of the bits
#: What a number must be less than.
MOST = 1 << (63 - _TAG_BITS)
_GONE = MOST - 1
_PROOF_BYTES = 16
#: Looks at a rank's row between which nothing else is done: a sleep of no time takes longer.
_LOOKS = 100
#: Seconds of a wait after which looks are further apart, up to the longest pause; and between two
#: looks at whether the rank is still there.
_PATIENCE, _LONGEST_PAUSE, _BETWEEN_SIGNS = 1e-3, 1e-3, 0.5
#: How many rows are kept in the form in which they are written or read.
_MOST_KEPT = 1024


class Gone(Exception):  # noqa: N818  # an agreement makes a RuntimeError of it
    """A rank has given up, has ended or did not come."""


class Board:
    """A row of numbers for each rank, twice: a rank may be one exchange ahead of another, and no
    further, as it has read the numbers of all.
    """

    def __init__(self, file: IO[bytes], memory: mmap.mmap, rank: int, size: int, width: int):
        self._file, self._memory = file, memory  # the file is locked as long as it is open
        self._rank, self._size = rank, size
        self._row = struct.Struct(f"@{width + 1}q")
        # A row is handled as one large number: a loop over its words takes the host many times as
        # long. These have 1, and all bits of a tag, in each word.
        self._ones = self._as_one([1] * (width + 1))
        self._tags = _TAGS * self._ones
        self._calls = 0
        #: Rows as they are written, without tags, by their numbers, and the other way round.
        self._rows: dict[tuple[int, ...], int] = {}
        self._numbers: dict[int, tuple[int, ...]] = {}

    @staticmethod
    def of(group: Any, width: int) -> Board | None:
        """Returns a board for rows of so many numbers; ``None`` unless the ranks of a group share a
        host and each is a process. Called by all of them.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        length = _PROOF_BYTES + 2 * size * 8 * (width + 1)
        with contextlib.ExitStack() as until_opened:
            file, made = _made(until_opened, length) if rank == 0 else (None, None)
            said: list[Any] = [None] * size
            dist.all_gather_object(said, (os.getpid(), made), group=group)
            opened = _opened(file, said[0][1], rank, length)
            if len({pid for pid, _ in said}) < size:
                opened = None  # threads, which would hold each other's locks
            could: list[Any] = [None] * size
            dist.all_gather_object(could, opened is not None, group=group)
        if opened is None or not all(could):
            return None
        return Board(*opened, rank, size, width)

    def exchange(self, numbers: Sequence[int], seconds: float) -> list[tuple[int, ...]]:
        """Returns the numbers of all ranks, by rank.

        Raises:
            Gone: a rank does not come, within so many seconds.
        """
        self._calls += 1
        call = self._calls  # another thread may begin the next one
        self._write(call, numbers)
        try:
            return [self._read(call, rank, seconds) for rank in range(self._size)]
        except BaseException:  # Ctrl-C too: no other rank should go on without this one
            self._write(call, [_GONE] * len(numbers))
            raise

    def _write(self, call: int, numbers: Sequence[int]) -> None:
        key = tuple(numbers)
        if (row := self._rows.get(key)) is None:
            row = self._as_one([number << _TAG_BITS for number in (*key, 0)])
            _keep(self._rows, key, row)
        place = self._place(call, self._rank)
        tagged = row | _tag(call) * self._ones
        self._memory[place : place + self._row.size] = tagged.to_bytes(
            self._row.size, sys.byteorder
        )

    def _read(self, call: int, rank: int, seconds: float) -> tuple[int, ...]:
        tag, place = _tag(call) * self._ones, self._place(call, rank)
        row = self._look(place, tag)
        if row is None:
            row = self._awaited(rank, place, tag, seconds)
        if (found := self._numbers.get(row)) is None:
            words = self._row.unpack(row.to_bytes(self._row.size, sys.byteorder))
            found = tuple([word >> _TAG_BITS for word in words[:-1]])
            _keep(self._numbers, row, found)
        if found[0] == _GONE:
            raise Gone
        return found

    def _awaited(self, rank: int, place: int, tag: int, seconds: float) -> int:
        start = sign = time.monotonic()
        while (row := self._look(place, tag)) is None:
            now = time.monotonic()
            if now - start > seconds:
                raise Gone
            if now - sign > _BETWEEN_SIGNS:
                sign = now
                # What it wrote before it ended counts.
                if self._has_ended(rank) and self._look(place, tag) is None:
                    raise Gone
            time.sleep(min(_LONGEST_PAUSE, (now - start) / 4) if now - start > _PATIENCE else 0)
        return row

    def _look(self, place: int, tag: int) -> int | None:
        """Returns a row without its tags once all of them are these."""
        for _ in range(_LOOKS):
            row = int.from_bytes(self._memory[place : place + self._row.size], sys.byteorder)
            if row & self._tags == tag:
                return row ^ tag
        return None

    def _as_one(self, words: Sequence[int]) -> int:
        return int.from_bytes(self._row.pack(*words), sys.byteorder)

    def _place(self, call: int, rank: int) -> int:
        return _PROOF_BYTES + (call % 2 * self._size + rank) * self._row.size

    def _has_ended(self, rank: int) -> bool:
        """Returns whether a rank's process has: its lock goes with it."""
        if rank == self._rank:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= _MOST_KEPT:
        table.clear()
    table[key] = value


def _tag(call: int) -> int:
    """Returns the number of a call, which is never 0: a row is cleared before it is written."""
    return call % _TAGS + 1


def _made(
    until_opened: contextlib.ExitStack, length: int
) -> tuple[IO[bytes] | None, tuple[str, bytes] | None]:
    """Makes the file, whose name is there until all have opened it; returns it, and its path and
    what proves that a file of that path is this one.
    """
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None  # memory, not a disk
    try:
        number, path = tempfile.mkstemp(prefix="cuda_ops.", dir=folder)
        until_opened.callback(os.unlink, path)
        file = os.fdopen(number, "r+b")
        proof = secrets.token_bytes(_PROOF_BYTES)
        file.write(proof.ljust(length, b"\0"))
        file.flush()
    except OSError:
        return None, None
    return file, (path, proof)


def _opened(
    file: IO[bytes] | None, made: tuple[str, bytes] | None, rank: int, length: int
) -> tuple[IO[bytes], mmap.mmap] | None:
    """Opens and locks the file of rank 0, which has it open: to close it once would end all locks.
    Returns ``None`` if the path is that of another file, on another host, or it cannot be.
    """
    if made is None or fcntl is None:
        return None
    path, proof = made
    try:
        file = file or os.fdopen(os.open(path, os.O_RDWR), "r+b")
        file.seek(0)
        if file.read(_PROOF_BYTES) != proof:
            return None
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        return file, mmap.mmap(file.fileno(), length)
    except OSError:
        return None
