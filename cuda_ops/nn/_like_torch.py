"""What modules do as torch's own: refuse an argument by its name, and widen under autocast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NoReturn, TypeGuard

import torch

from cuda_ops.runtime.arguments import is_number

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
        refuse_call(module, argument, "a tensor", kind_of(given))


def kind_of(given: object) -> str:
    """Returns what an error shows of an argument that has the wrong type."""
    return "None" if given is None else type(given).__name__


def has_values(given: torch.Tensor) -> bool:
    """Tells whether a module may look at the values of a tensor: it is a plain one on a CPU, so
    that nothing waits for a device, and nothing records or transforms the call.
    """
    return not (
        torch.compiler.is_compiling()
        or type(given) is not torch.Tensor
        or given.device.type != "cpu"
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


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


def is_int(given: object) -> TypeGuard[int]:
    """Tells whether an argument is an int, of NumPy's too, and not a bool."""
    return isinstance(given, (Integral, torch.SymInt)) and not isinstance(given, bool)


def must_be_int(
    module: str, argument: str, given: Any, least: int, most: int | None = None
) -> None:
    """Refuses an argument of a constructor that is no int, or out of range."""
    if not is_int(given) or given < least or (most is not None and given > most):
        end = "on" if most is None else f"to {most}"
        refuse(module, argument, f"an int from {least} {end}", given)


def must_be_number(module: str, argument: str, given: Any, most: float = math.inf) -> None:
    """Refuses an argument of a constructor that is no number from 0 to ``most``, or is infinite."""
    if not is_number(given) or not 0 <= given <= most or math.isinf(given):
        expected = "a number of 0 or more" if most == math.inf else f"a number from 0 to {most:g}"
        refuse(module, argument, expected, given)


def must_be_bool(module: str, argument: str, given: object) -> None:
    """Refuses an argument of a constructor that is no bool, most of which would count as True."""
    if not isinstance(given, bool):
        refuse(module, argument, "a bool", given)


def must_be_shape(module: str, argument: str, given: Any) -> None:
    """Refuses an argument of a constructor that is neither a size nor a sequence of sizes."""
    sizes = (given,) if is_int(given) else given
    if (
        not isinstance(sizes, Sequence)
        or isinstance(sizes, str)
        or not all(is_int(size) and size >= 0 for size in sizes)
    ):
        refuse(module, argument, "an int from 0 on, or a tuple of them", given)


def refuse_in_place(module: str, inplace: bool) -> None:
    if inplace:
        refuse(module, "inplace", "False, since the operator writes a tensor of its own", inplace)
