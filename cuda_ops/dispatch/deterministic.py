"""``torch.use_deterministic_algorithms`` for operators that are ``.nondeterministic()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.spec import OpSpec

#: The lowest key above the backends, which every call of the dispatcher with a kernel passes.
_KEY = torch._C.DispatchKey.BackendSelect


def register(library: torch.library.Library, name: str, spec: Callable[[], OpSpec]) -> None:
    """Registers the kernel that asks at each call of an operator; ``spec`` is asked at each call,
    so that a reload can change it.
    """

    def asking(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        op = spec()
        if torch._C._get_deterministic_algorithms():
            given = (one for value in (*args, *kwargs.values()) for one in _listed(value))
            alert(op, {one.device.type for one in given if isinstance(one, torch.Tensor)})
        return op.overload.redispatch(keyset.remove(_KEY), *args, **kwargs)

    library.impl(name, asking, _KEY.name, with_keyset=True)


def alert(op: OpSpec, devices: set[str]) -> None:
    """Raises or warns, as torch is told to, if the operator may give other bits on these devices.

    Raises:
        RuntimeError: in the words of torch's own operators.
    """
    if not torch._C._get_deterministic_algorithms():
        return
    if "" not in op.nondeterministic and not devices & set(op.nondeterministic):
        return
    if torch._C._get_deterministic_algorithms_warn_only():
        warnings.warn(
            f"{op.qualname} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True, warn_only=True)'",
            stacklevel=3,
        )
        return
    raise RuntimeError(
        f"{op.qualname} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
        "operation, or you can use the 'warn_only=True' option, if that's acceptable for your "
        "application."
    )


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)
