"""Passes the values of a sample to a function: in the schema's order, keyword-only ones by name.

Operators, references and sharding rules are all called this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cuda_ops.spec import OpSpec


def sampled_arguments(op: OpSpec) -> list[Any]:
    """Returns the schema's arguments, but not the last keyword-only ones that can have no value but
    their default: a generator, a memory format, a dtype without a list.
    """
    arguments = list(op.parsed.arguments)
    while arguments and arguments[-1].kwarg_only and not _varies(op, arguments[-1]):
        arguments.pop()
    return arguments


def _varies(op: OpSpec, argument: Any) -> bool:
    kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    listed = argument.name in op.choices or argument.name in op.dtypes_of
    at = op.argument_names.index(argument.name)
    is_drawn = kind in ("Tensor", "float", "int", "bool") or at == op.device_position
    return listed or is_drawn or not argument.has_default_value()


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns ``function`` of an argument, or a list of it for each element of a list."""
    if isinstance(value, (list, tuple)):
        return [function(one) for one in value]
    return function(value)


def spread(values: Iterable[Any]) -> list[Any]:
    """Returns arguments with the elements of lists in place of the lists."""
    return [
        one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])
    ]


def in_order(op: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` so that it takes the operator's keyword-only arguments by position."""
    names = [argument.name for argument in op.parsed.arguments if argument.kwarg_only]
    count = len(op.parsed.arguments) - len(names)

    def called(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=False)))

    return called if names else function


def by_keyword(op: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function``, which takes the operator's arguments by name, in another order say, so
    that it takes them in the schema's.
    """
    return lambda *values: function(**dict(zip(op.argument_names, values, strict=False)))


def split(op: OpSpec, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the values to pass by position, and those to pass by name."""
    parts: tuple[tuple[Any, ...], dict[str, Any]] = in_order(op, lambda *a, **k: (a, k))(*values)
    return parts
