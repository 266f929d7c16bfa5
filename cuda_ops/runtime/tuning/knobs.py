"""The knobs of an opened library, as ``src/utils/tuned.h`` declares them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch

#: How many values of a knob the library writes at most.
_MOST_VALUES = 16
#: As in ``tuned.h``: sizes from here on are one bucket.
_MOST_BITS = 31


def size_bits(size: int) -> int:
    """Returns how many bits a size takes, 31 at most: sizes with as many are tuned as one.

    Example:
    >>> [size_bits(size) for size in (0, 1, 2, 3, 4, 2**40)]
    [0, 1, 2, 2, 3, 31]
    """
    return min(size.bit_length(), _MOST_BITS)


class Knobs:
    """Reads and sets the knobs of a library. A value is set for the whole process, at once."""

    def __init__(self, library: Path) -> None:
        """Takes hold of a library that is open; opening it again gives the same one."""
        self.library = library
        self._handle = ctypes.CDLL(str(library))
        #: By name, the legal values, the default first; empty for a library without knobs.
        self.values: dict[str, tuple[int, ...]] = {}
        if not hasattr(self._handle, "cuda_ops_knob_name"):
            return
        self._handle.cuda_ops_knob_name.restype = ctypes.c_char_p
        self._handle.cuda_ops_knob_bucket.argtypes = [
            ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p,
        ]  # fmt: skip
        index = 0
        while (name := self._handle.cuda_ops_knob_name(index)) is not None:
            room = (ctypes.c_int * _MOST_VALUES)()
            count = self._handle.cuda_ops_knob_values(name, room)
            self.values[name.decode()] = tuple(room[:count])
            index += 1

    def bucket(self, bits: tuple[int, int], dtype: torch.dtype) -> int:
        """Returns the number of a bucket: of rows and columns of so many bits, and a dtype."""
        rows, columns = (1 << (b - 1) if b else 0 for b in bits)
        name = str(dtype).removeprefix("torch.").encode()
        return int(self._handle.cuda_ops_knob_bucket(rows, columns, name))

    def get(self, name: str, bucket: int) -> int:
        """Returns what a knob is set to for a bucket.

        Raises:
            KeyError: the library has no such knob, or no such bucket.
        """
        value = ctypes.c_int()
        if self._handle.cuda_ops_knob_get(name.encode(), bucket, ctypes.byref(value)):
            raise KeyError(f"{self.library.name}: no knob {name!r} with a bucket {bucket}")
        return value.value

    def choose(self, bucket: int, settings: Mapping[str, int]) -> None:
        """Sets every knob for a bucket: those that ``settings`` leaves out to their defaults.

        Raises:
            ValueError: the library has no such knob, or the value is not legal; then none is set.
        """
        self.check(settings)
        for name, values in self.values.items():
            self._handle.cuda_ops_knob_set(name.encode(), bucket, settings.get(name, values[0]))

    def check(self, settings: Mapping[str, object]) -> None:
        """Refuses settings that name no knob of the library, or a value that is not legal.

        Raises:
            ValueError: names the knob, what is legal and what was given.
        """
        for name, value in settings.items():
            if name not in self.values:
                known = ", ".join(sorted(self.values)) or "none"
                raise ValueError(f"knob {name!r}: expected one of the library's, {known}")
            if not isinstance(value, int) or value not in self.values[name]:
                raise ValueError(
                    f"knob {name!r}: expected one of {sorted(self.values[name])}, got {value!r}"
                )
