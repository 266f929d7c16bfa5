"""``torch.autocast`` for operators that declare a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cuda_ops.dispatch.generation import Served
from cuda_ops.dispatch.naming import named
from cuda_ops.spec import AutocastPolicy, AutocastWord

_KEYS = {
    "cpu": torch._C.DispatchKey.AutocastCPU,
    "cuda": torch._C.DispatchKey.AutocastCUDA,
}


def register(library: torch.library.Library, operator: Served) -> None:
    """Registers the Autocast kernels. The policy is asked for at each call, so that a reload can
    change it.
    """
    for device, key in _KEYS.items():
        library.impl(operator.spec.name, _kernel(operator, device, key), key.name)


def _kernel(operator: Served, device: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
    below = torch._C.DispatchKeySet(key)

    def autocast_kernel(*args: Any, **kwargs: Any) -> Any:
        overload = operator.spec.overload
        with torch._C._ExcludeDispatchKeyGuard(below):
            names = [argument.name for argument in overload._schema.arguments]
            with named(operator.spec):
                args, kwargs = cast(operator.now.autocast, device, names, args, kwargs)
            return overload(*args, **kwargs)

    return autocast_kernel


def cast(
    policy: AutocastPolicy | None,
    device: str,
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Casts the arguments as the policy says; ``names`` lists all arguments of the operator.
    Leaves float64 alone, as torch does.
    """
    given = [*zip(names, args, strict=False), *kwargs.items()]
    by_name: Mapping[str, AutocastWord] = (
        policy if isinstance(policy, Mapping) else dict.fromkeys(names, policy) if policy else {}
    )
    words = {n: by_name[n] for n, value in given if n in by_name and _is_eligible(value, device)}
    targets = {
        word: _target(word, device, [value for n, value in given if words.get(n) == word])
        for word in set(words.values())
    }
    values = [value.to(targets[words[n]]) if n in words else value for n, value in given]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _is_eligible(value: Any, device: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.dtype.itemsize > 1  # torch promotes no float8
        and value.device.type == device
        and _has_memory(value)
    )


#: Subclasses may keep their memory elsewhere.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _has_memory(value: torch.Tensor) -> bool:
    """Tells whether a tensor's elements are there: torch would read what was freed of it, where the
    operator refuses it by name.
    """
    if type(value) not in _PLAIN or torch._is_functional_tensor(value):
        return True
    try:
        return value.numel() == 0 or value.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):
        # Tensors under vmap and sparse ones have no memory of their own: torch casts or refuses.
        return True


def _target(word: AutocastWord, device: str, tensors: list[torch.Tensor]) -> torch.dtype:
    if word == "lower_precision":
        return torch.get_autocast_dtype(device)
    if word == "float32":
        return torch.float32
    # Neither half type holds the other; torch.add gives float32 too, where torch's own "promote"
    # operators refuse half types other than autocast's.
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
