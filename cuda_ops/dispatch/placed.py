"""Operators without a tensor argument, whose Device argument says which kernel to call.

No key of the dispatcher comes from their arguments, so a kernel of BackendSelect chooses, as it
does for ``torch.empty``. C++ gets a device with an index, also where the caller passed ``None``.
"""

from __future__ import annotations

from typing import Any

import torch

from cuda_ops.derive.arguments import bind, split
from cuda_ops.derive.checks import refuse
from cuda_ops.dispatch.generation import Served
from cuda_ops.spec import OpSpec


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
        key = _key(op, op.argument_names[position], device)
        positional, keywords = split(op, values)
        return op.overload.redispatch(torch._C.DispatchKeySet(key), *positional, **keywords)

    library.impl(operator.spec.name, select, "BackendSelect")


def _key(op: OpSpec, argument: str, device: torch.device) -> torch._C.DispatchKey:
    keys = {"cpu": "CPU" in op.keys, "cuda": op.has_cuda}
    known = [kind for kind, has_kernel in keys.items() if has_kernel]
    if device.type not in (*known, "meta"):
        refuse(op, argument, f"a device of type {' or '.join(known)}", device.type)
    name = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type, "Meta")
    key: torch._C.DispatchKey = getattr(torch._C.DispatchKey, name)
    return key


def _with_index(device: torch.device) -> torch.device:
    """Returns the device that ``torch.device("cuda")`` stands for now."""
    index: int | None = device.index
    if device.type != "cuda" or index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def default_device() -> torch.device:
    """Returns where ``torch.empty`` would make a tensor now, also while torch.compile traces."""
    return torch.empty(0).device
