"""Sizes that may be symbolic, and questions about them that a trace survives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Dims = Sequence[int | torch.SymInt]


def is_true(condition: bool | torch.SymBool) -> bool:
    """Returns ``bool(condition)``: by a guard where sizes are symbolic, ``False`` where one has no
    value.
    """
    # torch.compile says of symbols too that they are bool.
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def is_surely_true(condition: bool | torch.SymBool) -> bool:
    """Returns ``bool(condition)``, or ``False`` without a guard where another symbolic size could
    make it false.
    """
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def may_be_equal(actual: Dims, expected: Dims) -> bool:
    """Says whether the shapes are the same, as far as their sizes have values."""
    return len(actual) == len(expected) and not any(
        is_true(size != other) for size, other in zip(actual, expected, strict=True)
    )


def shape_name(shape: Dims) -> str:
    # Not by str(): torch.compile cannot trace that of a symbolic size.
    return "[" + ", ".join([f"{size}" for size in shape]) + "]"
