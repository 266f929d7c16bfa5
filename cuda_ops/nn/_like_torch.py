"""What modules do as torch's own: refuse an argument by its name, and widen under autocast."""

from __future__ import annotations

from typing import NoReturn

import torch

#: Operators of torch's that modules stand in for, each with a device on which autocast runs it in
#: float32. It does that to more of them on a GPU than on a CPU.
_WIDE_UNDER_AUTOCAST = frozenset(
    (op, device)
    for op in ("layer_norm", "rms_norm", "nll_loss")
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key)
)


def widened(x: torch.Tensor, op: str) -> torch.Tensor:
    """Returns x in float32 where ``torch.autocast`` would hand it to torch's operator like that, so
    that a model has the same dtypes with either module.
    """
    device = x.device.type
    if (
        (op, device) in _WIDE_UNDER_AUTOCAST
        and x.dtype in (torch.float16, torch.bfloat16)
        and torch.is_autocast_enabled(device)
    ):
        return x.float()
    return x


def must_be_tensor(module: torch.nn.Module, argument: str, given: object) -> None:
    """Refuses what a module is called with if it is no tensor, and nothing that stands for one, as
    an fx Proxy does. An operator does so itself: this is for what looks at a tensor before.
    """
    if not isinstance(given, torch.Tensor) and not torch.overrides.has_torch_function((given,)):
        got = "None" if given is None else type(given).__name__
        refuse_call(module, argument, "a tensor", got)


def refuse_call(module: torch.nn.Module, argument: str, expected: str, got: str) -> NoReturn:
    """Refuses an argument of a call, as operators do."""
    name = f"cuda_ops.nn.{type(module).__name__}"
    raise RuntimeError(f"{name}: argument {argument!r}: expected {expected}, got {got}")


def refuse(module: str, argument: str, expected: str, got: object) -> NoReturn:
    """Refuses an argument of a constructor."""
    shown = f"a tensor of shape {list(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
    raise ValueError(
        f"cuda_ops.nn.{module}: argument {argument!r}: expected {expected}, got {shown}"
    )


def refuse_in_place(module: str, inplace: bool) -> None:
    if inplace:
        refuse(module, "inplace", "False, since the operator writes a tensor of its own", inplace)
