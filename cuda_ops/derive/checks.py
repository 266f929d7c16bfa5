"""Refuses what the C++ side refuses, in the same order and words, also for tensors without data.

``check_arguments`` mirrors ``detail::Checks`` of ``src/utils/checks.h``, which gets the texts below
from :mod:`cuda_ops.dispatch.check_rules`: a fake tensor must be refused as the real one is. Sizes
may be symbolic, so sizes that must agree go through ``torch._check``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from cuda_ops.derive.arguments import group_of
from cuda_ops.derive.sizes import Dims, is_true, shape_name
from cuda_ops.signature import Group, factor_and_name, size_of
from cuda_ops.spec import UNBOUNDED, FloatRange, OpSpec, Range

#: ``kMaxDims`` of ``layout.h``: the dims that a kernel walks, those of size 1 left out.
MAX_DIMS = 16

#: The dtypes of ``DType`` in ``dtype.h``: what an argument without a list of its own may have.
KNOWN_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip


def check_arguments(op: OpSpec, values: Sequence[Any]) -> dict[str, Any]:
    """Refuses what the operator's C++ checks refuse, in the same words.

    Args:
        op: the operator.
        values: one for each argument of its schema.

    Returns:
        The size of each named dim, including output dims that are int arguments.

    Raises:
        RuntimeError: ``cuda_ops::<op>: argument '<arg>': expected <...>, got <...>``.
    """
    if (device_at := op.device_position) is not None and values[device_at] is not None:
        check_kernel(op, torch.device(values[device_at]))
    bound: dict[str, Any] = {}
    first: tuple[str, torch.Tensor] | None = None
    sharing: tuple[str, torch.Tensor] | None = None
    for i, position in enumerate(op.tensor_positions):
        name, tensor = op.argument_names[position], values[position]
        if tensor is None:
            if not str(op.parsed.arguments[position].type).startswith("Optional"):
                refuse(op, name, "a tensor", "None")
            continue
        if tensor.layout is not torch.strided:
            refuse(op, name, "a strided tensor", "another layout")
        if first is None:
            first = (name, tensor)
        else:
            check_device(op, name, tensor, *first)
        allowed, shares = op.allowed_dtypes(name), name not in op.dtypes_of
        if shares and sharing is not None:
            like, other = sharing
            if not allowed:
                check_dtype(op, name, tensor.dtype)
            elif tensor.dtype != other.dtype:
                expected = f"dtype {dtype_name(other.dtype)} like '{like}'"
                refuse(op, name, expected, dtype_name(tensor.dtype))
        else:
            check_dtype(op, name, tensor.dtype, allowed)
            sharing = (name, tensor) if shares else sharing
        if position in op.written and is_repeated(tensor):
            expected = "a tensor whose elements share no memory, as the operator writes it"
            has_0 = any(is_true(stride == 0) for stride in tensor.stride())
            refuse(op, name, expected, "one with stride 0" if has_0 else "one of overlapping rows")
        bind_dims(op, name, group_of(op, i), tensor.shape, bound)
    _check_ints(op, values, bound)
    _check_floats(op, values)
    _check_scalar_types(op, values)
    _check_names(op, values)
    _check_lists(op, values, None if first is None else first[1])
    ints = op.signature.int_names if op.signature is not None else ()
    return bound | {name: values[op.argument_names.index(name)] for name in ints}


def is_repeated(tensor: torch.Tensor) -> bool:
    """Says whether elements of a tensor share memory, as far as two of its dims tell, in sizes that
    are known.
    """
    if any(is_true(size == 0) for size in tensor.shape):
        return False
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    if any(is_true(stride == 0) and is_true(size > 1) for size, stride in dims):
        return True
    known = [(n, step) for n, step in dims if type(n) is int and type(step) is int and n > 1]
    return any(_meet(*pair) for pair in itertools.combinations(known, 2))


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Says whether steps along two dims, of a size and a stride each, lead to one element."""
    (n, x), (m, y) = one, other
    common = math.gcd(x, y)
    return y // common < n and x // common < m


def _check_lists(op: OpSpec, values: Sequence[Any], first: torch.Tensor | None) -> None:
    for name, value in zip(op.argument_names, values, strict=True):
        for tensor in value if isinstance(value, (list, tuple)) else ():
            if not isinstance(tensor, torch.Tensor):
                continue
            first = tensor if first is None else first
            if tensor.layout is not torch.strided:
                refuse(op, name, "a strided tensor", "another layout")
            if tensor.device != first.device:
                expected = f"tensors on {device_name(first.device)} like the others"
                refuse(op, name, expected, f"one on {device_name(tensor.device)}")
            check_dtype(op, name, tensor.dtype)


def _check_ints(op: OpSpec, values: Sequence[Any], bound: dict[str, Any]) -> None:
    for position in op.int_positions:
        name, value = op.argument_names[position], values[position]
        if value is None:
            continue
        if name in op.ranges:
            wrong = partial(_wrong_int, op, name, range_text(op.ranges[name]), value)
            check_between(value, op.ranges[name], wrong)
        dim = op.limits.get(name)
        if dim in bound:
            limit = f"at most {bound[dim]}{limit_text(dim)}"
            torch._check(value <= bound[dim], partial(_wrong_int, op, name, limit, value))


def _check_floats(op: OpSpec, values: Sequence[Any]) -> None:
    for name, allowed in op.float_ranges.items():
        value = values[op.argument_names.index(name)]
        if value is None or (is_true(value >= allowed.lowest) and is_true(value <= allowed.most)):
            continue
        refuse(op, name, float_range_text(allowed), f"{float(value):g}")


def _check_scalar_types(op: OpSpec, values: Sequence[Any]) -> None:
    for name in op.dtype_names:
        value, allowed = values[op.argument_names.index(name)], op.dtypes_of.get(name, ())
        if allowed and value is not None and value not in allowed:
            refuse(op, name, dtypes_text(allowed), dtype_name(value))


def _check_names(op: OpSpec, values: Sequence[Any]) -> None:
    for name, known in op.choices.items():
        value = values[op.argument_names.index(name)]
        if value is not None and value not in known:
            refuse(op, name, names_text(known), f"'{value}'")


def _wrong_int(op: OpSpec, argument: str, expected: str, value: Any) -> str:
    return refusal(op, argument, expected, f"{value}")


def check_between(value: Any, allowed: Range, message: Callable[[], str], factor: int = 1) -> None:
    """Refuses a value outside of a range; it may be symbolic."""
    torch._check(value >= factor * allowed.least, message)
    if allowed.most != UNBOUNDED:
        torch._check(value <= factor * allowed.most, message)


def check_device(
    op: OpSpec, argument: str, tensor: torch.Tensor, like: str, other: torch.Tensor
) -> None:
    """Refuses a tensor that is not on the device of the argument ``like``."""
    if tensor.device != other.device:
        expected = f"a tensor on {device_name(other.device)} like '{like}'"
        refuse(op, argument, expected, f"one on {device_name(tensor.device)}")


def check_kernel(op: OpSpec, device: torch.device) -> None:
    """Refuses a device that the Device argument of an operator without tensors may not say."""
    assert op.device_position is not None
    keys = {"cpu": "CPU" in op.keys, "cuda": op.has_cuda}
    known = [kind for kind, has_kernel in keys.items() if has_kernel]
    if device.type not in (*known, "meta"):
        expected = f"a device of type {' or '.join(known)}"
        refuse(op, op.argument_names[op.device_position], expected, device.type)


def check_dtype(
    op: OpSpec, argument: str, dtype: torch.dtype, allowed: Sequence[torch.dtype] = ()
) -> None:
    """Refuses a dtype that is not in the list; an empty one stands for those that kernels know."""
    allowed = allowed or KNOWN_DTYPES
    if dtype not in allowed:
        refuse(op, argument, f"dtype {dtypes_text(allowed)}", dtype_name(dtype))


def check_flag(op: OpSpec, argument: str, given: object) -> None:
    """Refuses what is no bool as the argument of a public function that Python reads itself."""
    if not isinstance(given, bool):
        refuse(op, argument, "a bool", "None" if given is None else type(given).__name__)


def bind_dims(op: OpSpec, argument: str, group: Group, shape: Dims, bound: dict[str, Any]) -> None:
    """Matches the last dims of ``shape`` with core dims, adding those not yet in ``bound``."""
    dims, listed = group.core, dims_text(group)
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
            if name in op.ranges:
                within = range_text(op.ranges[name], factor)
                wrong = partial(_wrong_size, op, argument, expected, within, shape)
                check_between(actual, op.ranges[name], wrong, factor)
            times, limit = op.dim_limits.get(name, (1, ""))
            if limit in bound:
                most = f"at most {bound[limit] // times * factor}"
                most += dim_limit_text(name, times, limit)
                wrong = partial(_wrong_size, op, argument, expected, most, shape)
                torch._check(times * bound[name] <= bound[limit], wrong)
        size = size_of(dim, bound)
        check_equal(actual, size, partial(_wrong_size, op, argument, expected, size, shape))


def dims_text(group: Group) -> str:
    """Returns the dims as errors show them: ``(..., m, k)`` or ``[n]``."""
    dims = ", ".join(("...", *group.core) if group.loops else group.core)
    return f"({dims})" if group.loops else f"[{dims}]"


def dtypes_text(dtypes: Sequence[torch.dtype]) -> str:
    """Returns the list as errors show it: ``float64, float32 or float16``."""
    return _either(map(dtype_name, dtypes))


def names_text(names: Sequence[str]) -> str:
    """Returns what a str may be as errors show it: ``'mean', 'sum' or 'none'``."""
    return _either(f"'{name}'" for name in names)


def _either(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def range_text(allowed: Range, factor: int = 1) -> str:
    """Returns ``from 1 to 16``, both times a factor, or ``at least 1`` if there is no end."""
    if allowed.most == UNBOUNDED:
        return f"at least {factor * allowed.least}"
    return f"from {factor * allowed.least} to {factor * allowed.most}"


def float_range_text(allowed: FloatRange) -> str:
    """Returns ``from 0 to 1``, or ``above 0``, ``at least 0`` or ``at most 1``."""
    least, most = f"{allowed.least:g}", f"{allowed.most:g}"
    if allowed.most == math.inf:
        return f"above {least}" if allowed.is_open else f"at least {least}"
    return f"at most {most}" if allowed.least == -math.inf else f"from {least} to {most}"


def limit_text(dim: str) -> str:
    """Returns the end of ``at most 8, the size of dim 'e'``, after the number."""
    return f", the size of dim '{dim}'"


def dim_limit_text(name: str, times: int, limit: str) -> str:
    """Returns the end of ``at most 4, as 2r is at most d``, after the number."""
    return f", as {times if times > 1 else ''}{name} is at most {limit}"


def check_batch(op: OpSpec, argument: str, factor: torch.Tensor, batch: Dims) -> None:
    """Refuses a batch of more dims than a kernel walks, as ``check_batch`` of ``matmul_binding.h``
    does. A size that may turn out to be 1 does not count.
    """
    if len(batch) > MAX_DIMS and sum(is_true(size != 1) for size in batch) > MAX_DIMS:
        expected = f"at most {MAX_DIMS} batch dims other than 1 in the result"
        refuse(op, argument, expected, f"shape {shape_name(factor.shape)}")


def dtype_name(dtype: torch.dtype) -> str:
    """Returns ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """Returns the device as C++ names it: ``cpu``, ``meta`` or ``cuda:0``."""
    if device.type in ("cpu", "meta"):  # there is one of each
        return device.type
    index: int | None = device.index
    return f"{'cuda' if device.type == 'cuda' else 'device'}:{-1 if index is None else index}"


def check_equal(actual: Any, expected: Any, message: Callable[[], str]) -> None:
    """Refuses a size that is not the expected one; both may be symbolic."""
    torch._check(actual == expected, message)


def _wrong_size(op: OpSpec, argument: str, expected: str, size: Any, shape: Dims) -> str:
    return refusal(op, argument, f"{expected} {size}", f"shape {shape_name(shape)}")


def refusal(op: OpSpec, argument: str, expected: str, actual: str) -> str:
    """Returns the text of an error: operator, argument, expected, actual."""
    return f"{op.qualname}: argument '{argument}': expected {expected}, got {actual}"


def refuse(op: OpSpec, argument: str, expected: str, actual: str) -> None:
    """Raises a ``RuntimeError`` with that text."""
    raise RuntimeError(refusal(op, argument, expected, actual))
