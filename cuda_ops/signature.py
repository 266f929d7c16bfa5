"""The signature line: NumPy's generalized-ufunc notation, ``(m,k),(k,n)->(m,n)``.

Names are the core dims of each tensor; everything to their left is loop dims,
which broadcast. ``()->()`` is elementwise. A number is a fixed size.
See https://numpy.org/doc/stable/reference/c-api/generalized-ufuncs.html.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_GROUP = re.compile(r"\(([^()]*)\)")
_DIM = re.compile(r"[A-Za-z_]\w*|\d+")


@dataclass(frozen=True)
class Signature:
    """Core dims of each tensor argument and each output, as written."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]

    @property
    def is_elementwise(self) -> bool:
        """No tensor has a core dim."""
        return not any(self.inputs) and not any(self.outputs)

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
    inputs, outputs = (_parse_side(text, side) for side in sides)
    known = {dim for group in inputs for dim in group}
    for group in outputs:
        for dim in group:
            if dim not in known and not dim.isdigit():
                raise ValueError(f"signature {text!r}: output dim {dim!r} is in no input")
    return Signature(inputs, outputs)


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
