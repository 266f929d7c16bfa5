"""The checks and the output layout of ``src/utils``, once more in Python.

A fake tensor has no data but must be refused, shaped and laid out as the real
one is. ``check_arguments`` follows ``detail::Checks`` of ``checks.h`` in
order and text, ``empty_outputs`` follows ``empty_elementwise`` of
``elementwise.h``. Sizes may be symbolic: sizes that must agree go through
``torch._check``, and whether a size is 1 is asked in a way that unbacked
sizes survive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cuda_ops.signature import Group, Signature, factor_and_name, size_of
from cuda_ops.spec import OpSpec

Dims = Sequence[int | torch.SymInt]
#: ``kMaxDims`` of ``strided.h``: the dims that a kernel walks, those of size 1 left out.
MAX_DIMS = 16


def bind(op: OpSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """One value per argument of the schema; the dispatcher drops those equal to their default."""
    values = list(args)
    for argument in op.parsed.arguments[len(values) :]:
        values.append(kwargs.get(argument.name, argument.default_value))
    return values


def check_part(
    check: Callable[..., None], op: OpSpec, values: Sequence[Any], in_dims: Sequence[int | None]
) -> None:
    """``check(op, ...)`` of the first part's arguments, for a rule of vmap: what is refused without
    is refused with it, and no mapped dim passes for another.
    """
    if torch._C._is_tracing():  # by torch.jit: sizes are tensors then
        return
    dims = [*in_dims, *[None] * (len(values) - len(in_dims))]
    parts = [v if d is None else v.select(d, 0) for v, d in zip(values, dims, strict=True)]
    check(op, *parts)


def of_no_parts(
    function: Callable[..., Any], values: Sequence[Any], in_dims: Sequence[int | None]
) -> tuple[Any, Any]:
    """What a rule of vmap returns where the mapped dim has no elements: results of one part, which
    is all zeros, none of them.
    """
    part = list(values)
    for i, dim in enumerate(in_dims):
        if dim is not None:
            shape = list(values[i].shape)
            del shape[dim]
            part[i] = values[i].new_zeros(shape)
    results = function(*part)
    if isinstance(results, torch.Tensor):
        return results.new_empty((0, *results.shape)), 0
    return tuple(r.new_empty((0, *r.shape)) for r in results), (0,) * len(results)


def tensor_arguments(op: OpSpec, values: Sequence[Any]) -> list[torch.Tensor | None]:
    """The values of type ``Tensor`` and ``Tensor?``, one per group of the signature's inputs."""
    return [values[i] for i in op.tensor_positions]


def group_of(op: OpSpec, index: int) -> Group:
    """The dims of the ``index``-th tensor argument; without a signature loop dims alone."""
    groups = op.signature.inputs if op.signature is not None else ()
    return groups[index] if index < len(groups) else Group(())


def loop_dims(op: OpSpec, index: int, shape: Dims) -> Dims:
    """Those of the ``index``-th tensor argument's dims that are loop dims."""
    group = group_of(op, index)
    return shape[: len(shape) - len(group.core)] if group.loops else ()


def rows_are_independent(op: OpSpec) -> bool:
    """Whether each index of the loop dims is computed on its own, as if there were no other.

    Not where a result is of all of them, and neither in the gradient of that; but what is a
    gradient of a row's own result is, and one in brackets is the sum over the rows.
    """
    assert op.signature is not None
    forward = op.siblings.get(op.name.removesuffix("_backward"), op)
    if forward.name == op.name or forward.signature is None:
        return all(group.loops for group in op.signature.outputs)
    named = zip(op.output_names, op.signature.outputs, strict=True)
    gradients = all(group.loops or name.startswith("grad_") for name, group in named)
    return gradients and rows_are_independent(forward)


# --- what is checked before a kernel sees its arguments ----------------------


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
    """Refuse a batch of more dims than a kernel walks, as ``check_batch`` of ``tensor_matmul.h``.
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


def shape_name(shape: Dims) -> str:
    # Not by str(): torch.compile cannot trace that of a symbolic size.
    return "[" + ", ".join([f"{size}" for size in shape]) + "]"


def _agree(actual: Any, expected: Any, message: Callable[[], str]) -> None:
    torch._check(actual == expected, message)


def _wrong_size(op: OpSpec, argument: str, expected: str, size: Any, shape: Dims) -> str:
    return refusal(op, argument, f"{expected} {size}", f"shape {shape_name(shape)}")


def refusal(op: OpSpec, argument: str, expected: str, actual: str) -> str:
    return f"{op.qualname}: argument '{argument}': expected {expected}, got {actual}"


def refuse(op: OpSpec, argument: str, expected: str, actual: str) -> None:
    raise RuntimeError(refusal(op, argument, expected, actual))


# --- the outputs ---------------------------------------------------------------


def broadcast(op: OpSpec, tensors: Sequence[Any]) -> list[Any]:
    """The shape that the loop dims of an operator's tensor arguments broadcast to.

    Args:
        op: the operator.
        tensors: what has a ``shape``, or ``None``, for each of its tensor arguments.

    Raises:
        RuntimeError: ``cuda_ops::<op>: argument '<arg>': expected dims '...' of (..., k, n) to
            broadcast with [2], got shape [3, 4, 5]``.
    """
    result: list[Any] = []
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        loop = loop_dims(op, i, tensor.shape)
        refusal = partial(_no_broadcast, op, i, tensor.shape, list(result))
        result[:0] = [1] * (len(loop) - len(result))
        for d, actual in enumerate(loop, start=len(result) - len(loop)):
            if is_true(result[d] == 1):
                result[d] = actual
            elif not is_true(actual == 1):
                _agree(actual, result[d], refusal)
    return result


def _no_broadcast(op: OpSpec, index: int, shape: Dims, before: Dims) -> str:
    name = op.argument_names[op.tensor_positions[index]]
    listed = _listed(group_of(op, index))
    expected = f"dims '...' of {listed} to broadcast with {shape_name(before)}"
    return refusal(op, name, expected, f"shape {shape_name(shape)}")


def output_shapes(
    op: OpSpec, signature: Signature, tensors: Sequence[torch.Tensor | None], bound: dict[str, Any]
) -> list[list[Any]]:
    """Loop dims broadcast, core dims from ``bound``; one shape per output."""
    loop = tuple(broadcast(op, tensors))
    for group in signature.outputs:
        for dim in group.core:
            if factor_and_name(dim)[1] not in ("", *bound):
                raise RuntimeError(
                    f"{op.qualname}: output dim '{dim}' is a dim of an argument that is None"
                )
    return [list(group.shape(loop, bound)) for group in signature.outputs]


def empty_outputs(
    op: OpSpec, signature: Signature, tensors: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Check the tensor arguments, then allocate every output as the C++ side does.

    Contiguous, except that an elementwise operator whose inputs share one
    dense layout keeps it. dtype and device are those of the first tensor.
    """
    bound = check_arguments(op, tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    first = present[0]
    like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
    same = signature.is_elementwise and all(_same_layout(first, other) for other in present[1:])
    if same and is_dense(first):
        shape, strides = first.shape, first.stride()
        return tuple(torch.empty_strided(shape, strides, **like) for _ in signature.outputs)
    shapes = output_shapes(op, signature, tensors, bound)
    return tuple(torch.empty(shape, **like) for shape in shapes)


def is_dense(tensor: torch.Tensor) -> bool:
    """Every element of the storage span is used exactly once."""
    if tensor.is_contiguous():
        return True
    kept = [
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if not is_true(size == 1)
    ]
    expected: Any = 1
    while kept:
        at = next((i for i, (stride, _) in enumerate(kept) if is_true(stride == expected)), None)
        if at is None:
            return False
        expected = expected * kept.pop(at)[1]
    return True


def is_true(condition: bool | torch.SymBool) -> bool:
    """``bool(condition)``, by a guard where sizes are symbolic, and ``False`` where one has no
    value.
    """
    # torch.compile says of symbols too that they are bool.
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def is_surely_true(condition: bool | torch.SymBool) -> bool:
    """``bool(condition)``, and ``False``, without a guard, where another symbolic size could make
    it false.
    """
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def may_be_equal(actual: Dims, expected: Dims) -> bool:
    """Whether the shapes are the same, as far as their sizes have values."""
    return len(actual) == len(expected) and not any(
        is_true(size != other) for size, other in zip(actual, expected, strict=True)
    )


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dim() != b.dim():
        return False
    pairs = [*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True)]
    return all(is_true(x == y) for x, y in pairs)


# --- views ---------------------------------------------------------------------


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The dims (..., n) of ``tensor`` as (rows, n), where n may be 0; what is that is itself."""
    if tensor.dim() == 2:
        return tensor
    # Not flatten, for which torch has no rule where gradients are computed several at once.
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
