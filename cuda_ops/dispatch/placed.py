"""Operators without a tensor argument, whose Device argument says which kernel to call.

No key of the dispatcher comes from their arguments, so a kernel of BackendSelect chooses, as it
does for ``torch.empty``. C++ gets a device with an index, also where the caller passed ``None``.
"""

from __future__ import annotations

from typing import Any

import torch

from cuda_ops.derive.arguments import bind, split
from cuda_ops.derive.checks import check_kernel
from cuda_ops.dispatch import deterministic
from cuda_ops.dispatch.generation import Served

_KEYS = {
    kind: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    for kind, name in (("cpu", "CPU"), ("cuda", "CUDA"), ("meta", "Meta"))
}


def register(library: torch.library.Library, operator: Served) -> None:
    """Registers the kernel that calls the one of the device."""

    def select(*args: Any, **kwargs: Any) -> Any:
        op = operator.spec
        values = bind(op, args, kwargs)
        position = op.device_position
        assert position is not None
        # No default device is known here, as to none of torch's operators that are called by their
        # dispatcher's name. The public function asks for it.
        values[position] = device = _with_index(values[position] or torch.device("cpu"))
        check_kernel(op, device)
        deterministic.alert(op, {device.type})
        positional, keywords = split(op, values)
        return op.overload.redispatch(_KEYS[device.type], *positional, **keywords)

    library.impl(operator.spec.name, select, "BackendSelect")


def _with_index(device: torch.device) -> torch.device:
    """Returns the device that ``torch.device("cuda")`` stands for now."""
    index: int | None = device.index
    if device.type != "cuda" or index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def default_device() -> torch.device:
    """Returns where ``torch.empty`` would make a tensor now, also while torch.compile traces."""
    return torch.empty(0).device
