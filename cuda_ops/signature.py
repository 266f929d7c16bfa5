"""The signature line: NumPy's generalized-ufunc notation, ``(m,k),(k,n)->(m,n)``.

Names are the core dims of each tensor; everything to their left is loop dims,
which broadcast. ``()->()`` is elementwise. A number is a fixed size. Beyond
NumPy's notation, ``2d`` is twice the size of ``d``: ``(2d)->(d)``.
See https://numpy.org/doc/stable/reference/c-api/generalized-ufuncs.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GROUP = re.compile(r"\(([^()]*)\)")
_DIM = re.compile(r"(\d*)([A-Za-z_]\w*)|(\d+)")


def factor_and_name(dim: str) -> tuple[int, str]:
    """``"2d"`` is ``(2, "d")``, ``"d"`` is ``(1, "d")``, ``"3"`` is ``(3, "")``."""
    match = _DIM.fullmatch(dim)
    assert match is not None, dim
    factor, name, number = match.groups()
    return int(number or factor or 1), name or ""


def size_of(dim: str, sizes: Mapping[str, Any]) -> Any:
    """The size of a dim as written, given those of the named ones."""
    factor, name = factor_and_name(dim)
    if not name:
        return factor
    return sizes[name] if factor == 1 else factor * sizes[name]


@dataclass(frozen=True)
class Signature:
    """Core dims of each tensor argument and each output, as written."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]

    @property
    def is_elementwise(self) -> bool:
        """No tensor has a core dim."""
        return not any(self.inputs) and not any(self.outputs)

    @property
    def names(self) -> tuple[str, ...]:
        """The named dims of the inputs, sorted."""
        dims = (factor_and_name(dim)[1] for group in self.inputs for dim in group)
        return tuple(sorted({name for name in dims if name}))

    def __str__(self) -> str:
        def side(groups: tuple[tuple[str, ...], ...]) -> str:
            return ",".join(f"({','.join(group)})" for group in groups)

        return f"{side(self.inputs)}->{side(self.outputs)}"


def parse_signature(text: str) -> Signature:
    """Parse ``"(m,k),(k,n)->(m,n)"``.

    Raises:
        ValueError: the text is not of that form, or an output names a dim that no input has.
    """
    compact = "".join(text.split())
    sides = compact.split("->")
    if len(sides) != 2:
        raise ValueError(f"signature {text!r}: expected inputs->outputs with exactly one '->'")
    signature = Signature(*(_parse_side(text, side) for side in sides))
    for group in signature.outputs:
        for dim in group:
            if factor_and_name(dim)[1] not in ("", *signature.names):
                raise ValueError(f"signature {text!r}: output dim {dim!r} is in no input")
    return signature


def _parse_side(text: str, side: str) -> tuple[tuple[str, ...], ...]:
    groups = _GROUP.findall(side)
    if not groups or ",".join(f"({group})" for group in groups) != side:
        raise ValueError(f"signature {text!r}: expected groups like (m,k),(k,n), got {side!r}")
    parsed = []
    for group in groups:
        dims = tuple(group.split(",")) if group else ()
        for dim in dims:
            if not _DIM.fullmatch(dim):
                raise ValueError(f"signature {text!r}: {dim!r} is not a dim name or a size")
        parsed.append(dims)
    return tuple(parsed)
