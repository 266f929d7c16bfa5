"""Choices read from bytes, so that a fuzzer which changes bytes changes calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    r"""Reads choices from bytes; past their end each is the first.

    Example::

        assert Choices(b"\x01").pick(["a", "b"]) == "b"
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, count: int) -> int:
        """Returns a number from 0 to below ``count``, out of one byte, or of two."""
        width = 1 if count <= 256 else 2
        read = self._data[self._at : self._at + width]
        self._at += width
        return int.from_bytes(read, "little") % count

    def pick(self, values: Sequence[T]) -> T:
        """Returns one of the values."""
        return values[self.below(len(values))]

    def chance(self, one_in: int) -> bool:
        """Returns ``True`` once in so many times."""
        return self.below(one_in) == one_in - 1
