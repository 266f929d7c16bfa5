"""Refuses what the C++ side refuses, in the same order and words, for tensors without data too.

``check_arguments`` mirrors ``detail::Checks`` of ``src/utils/checks.h``: a fake tensor must be
refused as the real one is. Sizes may be symbolic, so sizes that must agree go through
``torch._check``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cuda_ops.derive.arguments import group_of
from cuda_ops.derive.sizes import Dims, is_true, shape_name
from cuda_ops.signature import Group, factor_and_name, size_of
from cuda_ops.spec import OpSpec

#: ``kMaxDims`` of ``strided.h``: the dims that a kernel walks, those of size 1 left out.
MAX_DIMS = 16


def check_arguments(op: OpSpec, tensors: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """Refuse what the operator's C++ checks refuse, in the same words.

    Returns:
        The size that each core dim is bound to.

    Raises:
        RuntimeError: ``cuda_ops::<op>: argument '<arg>': expected <...>, got <...>``.
    """
    names = [op.argument_names[i] for i in op.tensor_positions]
    bound: dict[str, Any] = {}
    first: tuple[str, torch.Tensor] | None = None
    for i, tensor in enumerate(tensors):
        name = names[i]
        if tensor is None:
            if not str(op.parsed.arguments[op.tensor_positions[i]].type).startswith("Optional"):
                refuse(op, name, "a tensor", "None")
            continue
        if tensor.layout is not torch.strided:
            refuse(op, name, "a strided tensor", "another layout")
        if first is None:
            first = (name, tensor)
            if op.dtypes and tensor.dtype not in op.dtypes:
                *most, last = map(dtype_name, op.dtypes)
                allowed = f"{', '.join(most)} or {last}" if most else last
                refuse(op, name, f"dtype {allowed}", dtype_name(tensor.dtype))
        else:
            like, other = first
            check_device(op, name, tensor, like, other)
            if op.dtypes and tensor.dtype != other.dtype:
                expected = f"dtype {dtype_name(other.dtype)} like '{like}'"
                refuse(op, name, expected, dtype_name(tensor.dtype))
        bind_dims(op, name, group_of(op, i), tensor.shape, bound)
    return bound


def check_device(
    op: OpSpec, argument: str, tensor: torch.Tensor, like: str, other: torch.Tensor
) -> None:
    """Refuse another device than that of the argument ``like``."""
    if tensor.device != other.device:
        expected = f"a tensor on {device_name(other.device)} like '{like}'"
        refuse(op, argument, expected, f"one on {device_name(tensor.device)}")


def bind_dims(op: OpSpec, argument: str, group: Group, shape: Dims, bound: dict[str, Any]) -> None:
    """Match the last dims of ``shape`` with core dims, adding those not yet in ``bound``."""
    dims, listed = group.core, _listed(group)
    if len(shape) < len(dims) if group.loops else len(shape) != len(dims):
        expected = f"{f'at least {len(dims)}' if group.loops else 'exactly the'} dims {listed}"
        refuse(op, argument, expected, f"shape {shape_name(shape)}")
    if torch._C._is_tracing():  # by torch.jit: sizes are tensors then, and the kernel compares them
        return
    for dim, actual in zip(dims, shape[len(shape) - len(dims) :], strict=True):
        expected = f"dim '{dim}' of {listed} to be"
        factor, name = factor_and_name(dim)
        if name and name not in bound:
            if factor > 1:
                multiple = f"a multiple of {factor}"
                wrong = partial(_wrong_size, op, argument, expected, multiple, shape)
                torch._check(actual % factor == 0, wrong)
            bound[name] = actual if factor == 1 else actual // factor
        size = size_of(dim, bound)
        _agree(actual, size, partial(_wrong_size, op, argument, expected, size, shape))


def _listed(group: Group) -> str:
    dims = ", ".join(("...", *group.core) if group.loops else group.core)
    return f"({dims})" if group.loops else f"[{dims}]"


def check_batch(op: OpSpec, argument: str, factor: torch.Tensor, batch: Dims) -> None:
    """Refuse a batch of more dims than a kernel walks, as ``check_batch`` of ``matmul_binding.h``.
    A size that may turn out to be 1 does not count.
    """
    if len(batch) > MAX_DIMS and sum(is_true(size != 1) for size in batch) > MAX_DIMS:
        expected = f"at most {MAX_DIMS} batch dims other than 1 in the result"
        refuse(op, argument, expected, f"shape {shape_name(factor.shape)}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    if device.type in ("cpu", "meta"):  # there is one of each
        return device.type
    index: int | None = device.index
    return f"{'cuda' if device.type == 'cuda' else 'device'}:{-1 if index is None else index}"


def _agree(actual: Any, expected: Any, message: Callable[[], str]) -> None:
    torch._check(actual == expected, message)


def _wrong_size(op: OpSpec, argument: str, expected: str, size: Any, shape: Dims) -> str:
    return refusal(op, argument, f"{expected} {size}", f"shape {shape_name(shape)}")


def refusal(op: OpSpec, argument: str, expected: str, actual: str) -> str:
    return f"{op.qualname}: argument '{argument}': expected {expected}, got {actual}"


def refuse(op: OpSpec, argument: str, expected: str, actual: str) -> None:
    raise RuntimeError(refusal(op, argument, expected, actual))
