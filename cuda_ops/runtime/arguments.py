"""Checks of arguments that several functions of the runtime share; an error names both."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TypeGuard

import torch


def is_int(given: object) -> TypeGuard[int]:
    """Says whether an argument is an int, numpy's among them; a bool is none."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def is_number(given: object) -> TypeGuard[float]:
    """Says whether an argument is a real number, numpy's among them; a bool is none."""
    return isinstance(given, Real) and not isinstance(given, bool)


def check_count(
    function: str, argument: str, given: object, least: int = 1, most: int | None = None
) -> None:
    """Raises ValueError unless an argument is an int of ``least`` or more, and at most ``most``."""
    if not is_int(given) or given < least or (most is not None and given > most):
        wanted = f"an int of {least} or more" if most is None else f"an int from {least} to {most}"
        raise ValueError(f"{function}: argument '{argument}': expected {wanted}, got {given!r}")


def check_positive(function: str, argument: str, given: object) -> None:
    """Raises ValueError unless an argument is a positive number that is not infinite."""
    if not is_number(given) or not 0 < given < math.inf:
        raise ValueError(
            f"{function}: argument '{argument}': expected a positive number, got {given!r}"
        )


def check_flag(function: str, argument: str, given: object) -> None:
    """Raises TypeError unless an argument is a bool."""
    if not isinstance(given, bool):
        raise TypeError(f"{function}: argument '{argument}': expected True or False, got {given!r}")


def check_iterable(function: str, argument: str, given: object, *, one: str = "") -> None:
    """Raises TypeError unless ``iter`` takes an argument; ``one`` is how to write a single item."""
    # iter asks the type: a class has methods for its objects alone.
    kind = type(given)
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        raise TypeError(
            f"{function}: argument '{argument}': expected an iterable, got {kind.__name__}"
            + (f"; write {one} for one" if one and given is not None else "")
        )


def check_callable(function: str, argument: str, given: object) -> None:
    """Raises TypeError unless an argument can be called."""
    if not callable(given):
        raise TypeError(
            f"{function}: argument '{argument}': expected something to call, got "
            f"{type(given).__name__}"
        )


def check_mapping(function: str, argument: str, given: object, wanted: str) -> None:
    """Raises TypeError unless an argument is a mapping; ``wanted`` says of what."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{function}: argument '{argument}': expected {wanted}, got {type(given).__name__}"
        )


def checked_path(function: str, argument: str, given: str | os.PathLike[str]) -> Path:
    """Returns a path.

    Raises:
        TypeError: the argument is none.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"{function}: argument '{argument}': expected a path, got {type(given).__name__}"
        )
    return Path(given)


def loaded_key(function: str, op: object) -> str:
    """Returns the key of an operator, which it loads if need be.

    Args:
        function: whose argument ``op`` it is.
        op: a name, an :class:`~cuda_ops.spec.OpSpec`, ``cuda_ops.<op>`` itself, or the handle in
            ``torch.ops``.

    Raises:
        ValueError: there is no such operator.
        CudaOpsError: there is, and it cannot be used.

    >>> import cuda_ops
    >>> loaded_key("tune", cuda_ops.silu), loaded_key("tune", "cuda_ops::silu")
    ('silu', 'silu')
    """
    from cuda_ops.registry import registry

    key = _key(op)
    if key is None:
        raise ValueError(f"{function}: argument 'op': expected an operator of cuda_ops, got {op!r}")
    try:
        registry().public(key)
    except AttributeError as error:
        raise ValueError(f"{function}: argument 'op': {error}") from None
    return key


def _key(op: object) -> str | None:
    from cuda_ops.names import keyed
    from cuda_ops.registry import registry
    from cuda_ops.spec import OpSpec

    if isinstance(op, OpSpec):
        return op.key
    if isinstance(op, str):
        return registry().key_of(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return registry().key_of(op._qualified_op_name)
    if isinstance(op, torch._ops.OpOverload):
        return registry().key_of(op._schema.name)
    # Other functions may have the name of an operator's; whoever has that one has loaded it.
    name, module = getattr(op, "__name__", None), getattr(op, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        return None
    key = keyed(module, name)
    operator = registry().loaded(key)
    if operator is None or (op is not operator.public and op is not operator.direct):
        return None
    return key
