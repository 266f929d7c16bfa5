"""The signature line: NumPy's generalized-ufunc notation, ``(m,k),(k,n)->(m,n)``.

Names are the core dims of each tensor; everything to their left is loop dims,
which broadcast. ``()->()`` is elementwise. A number is a fixed size. Beyond
NumPy's notation, ``2d`` is twice the size of ``d``: ``(2d)->(d)``, and brackets
are all dims of a tensor: in ``(n),[n]->(n)`` one weight serves all rows. A dim of an output may
have the name of an int argument: ``(n)->(k)`` keeps k numbers of each row, and ``->(n)`` has no
tensor to begin with.
See https://numpy.org/doc/stable/reference/c-api/generalized-ufuncs.html.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

_GROUP = re.compile(r"\([^()[\]]*\)|\[[^()[\]]*\]")
_DIM = re.compile(r"(\d{0,18})([A-Za-z_]\w*)|(\d{1,18})")  # numbers of 64 bits


@cache
def factor_and_name(dim: str) -> tuple[int, str]:
    """Splits a dim: ``"2d"`` is ``(2, "d")``, ``"d"`` is ``(1, "d")``, ``"3"`` is ``(3, "")``."""
    match = _DIM.fullmatch(dim)
    assert match is not None, dim
    factor, name, number = match.groups()
    return int(number or factor or 1), name or ""


def size_of(dim: str, sizes: Mapping[str, Any]) -> Any:
    """Returns the size of a dim as written, given the sizes of named dims."""
    factor, name = factor_and_name(dim)
    if not name:
        return factor
    return sizes[name] if factor == 1 else factor * sizes[name]


@dataclass(frozen=True)
class Group:
    """The dims of one tensor."""

    #: The core dims, as written.
    core: tuple[str, ...]
    #: Whether there may be loop dims to the left of them; in brackets there are none.
    loops: bool = True

    def shape(self, loop: tuple[Any, ...], sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the shape of a tensor with these loop dims, if it may have any."""
        return (*(loop if self.loops else ()), *(size_of(dim, sizes) for dim in self.core))

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(factor_and_name(dim)[1] for dim in self.core) - {""}

    def __str__(self) -> str:
        dims = ",".join(self.core)
        return f"({dims})" if self.loops else f"[{dims}]"


@dataclass(frozen=True)
class Signature:
    """The dims of each tensor argument and each output."""

    inputs: tuple[Group, ...]
    outputs: tuple[Group, ...]

    @property
    def is_elementwise(self) -> bool:
        """Whether tensors have loop dims only."""
        return all(group == Group(()) for group in (*self.inputs, *self.outputs))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The named dims of the inputs, sorted."""
        return tuple(sorted(set().union(*(group.names for group in self.inputs))))

    @cached_property
    def int_names(self) -> tuple[str, ...]:
        """The dims of the outputs whose sizes are int arguments, sorted."""
        outputs = set().union(*(group.names for group in self.outputs))
        return tuple(sorted(outputs.difference(self.names)))

    def __str__(self) -> str:
        return "->".join(",".join(map(str, side)) for side in (self.inputs, self.outputs))


def parse_signature(text: str, ints: Collection[str] = ()) -> Signature:
    """Parses ``"(m,k),(k,n)->(m,n)"``.

    Args:
        text: the line.
        ints: the names of the operator's int arguments, which outputs may have as sizes.

    Raises:
        ValueError: the text is not of that form, or a dim of an output is neither in an input nor
            an int argument.
    """
    compact = "".join(text.split())
    sides = compact.split("->")
    if len(sides) != 2:
        raise ValueError(f"signature {text!r}: expected inputs->outputs with exactly one '->'")
    # An operator that only writes its arguments has no outputs, "(n),(n)->", and one that makes
    # numbers of numbers no inputs, "->(n)".
    signature = Signature(*(_parse_side(text, side, none=compact != "->") for side in sides))
    for group in signature.outputs:
        for dim in group.core:
            if factor_and_name(dim)[1] not in ("", *signature.names, *ints):
                raise ValueError(f"signature {text!r}: output dim {dim!r} is in no input")
    return signature


def _parse_side(text: str, side: str, none: bool) -> tuple[Group, ...]:
    if none and not side:
        return ()
    matches = list(_GROUP.finditer(side))
    if not matches or ",".join(match[0] for match in matches) != side:
        raise ValueError(
            f"signature {text!r}: expected groups like (m,k),(k,n) or [n], got {side!r}"
        )
    parsed = []
    for match in matches:
        inside = match[0][1:-1]
        dims = tuple(inside.split(",")) if inside else ()
        for dim in dims:
            if not _DIM.fullmatch(dim):
                raise ValueError(f"signature {text!r}: {dim!r} is not a dim name or a size")
        parsed.append(Group(dims, loops=match[0].startswith("(")))
    return tuple(parsed)
