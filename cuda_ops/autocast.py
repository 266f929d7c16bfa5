"""``torch.autocast`` for operators that declare a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_KEYS = {
    "cpu": torch._C.DispatchKey.AutocastCPU,
    "cuda": torch._C.DispatchKey.AutocastCUDA,
}
_FLOATING_ORDER = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def register(library: torch.library.Library, name: str, policy: Callable[[], str | None]) -> None:
    """Register the Autocast kernels of ``cuda_ops::<name>``.

    ``policy`` is asked at each call, so that a reload can change it.
    """
    for device, key in _KEYS.items():
        library.impl(name, _kernel(name, device, key, policy), key.name)


def _kernel(
    name: str, device: str, key: torch._C.DispatchKey, policy: Callable[[], str | None]
) -> Callable[..., Any]:
    below = torch._C.DispatchKeySet(key)

    def autocast_kernel(*args: Any, **kwargs: Any) -> Any:
        overload = getattr(torch.ops.cuda_ops, name).default
        with torch._C._ExcludeDispatchKeyGuard(below):
            args, kwargs = cast(policy(), device, args, kwargs)
            return overload(*args, **kwargs)

    return autocast_kernel


def cast(
    policy: str | None, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the policy wants them. float64 is left alone, as torch leaves it."""
    values = [*args, *kwargs.values()]
    target = _target(policy, device, [v for v in values if _is_eligible(v, device)])
    if target is None:
        return args, kwargs

    def one(value: Any) -> Any:
        return value.to(target) if _is_eligible(value, device) else value

    return tuple(map(one, args)), {key: one(value) for key, value in kwargs.items()}


def _is_eligible(value: Any, device: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == device
    )


def _target(policy: str | None, device: str, tensors: list[torch.Tensor]) -> torch.dtype | None:
    if not tensors:
        return None
    if policy == "lower_precision":
        return torch.get_autocast_dtype(device)
    if policy == "float32":
        return torch.float32
    if policy == "promote":
        return max((tensor.dtype for tensor in tensors), key=_FLOATING_ORDER.index)
    return None
