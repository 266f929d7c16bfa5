"""Class 6: offsets that do not fit 32 bits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from cuda_ops.derive.arguments import group_of
from cuda_ops.spec import OpSpec, Range
from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.compare import expected_results, widened
from cuda_ops.testing.draw import Draw, plain
from cuda_ops.testing.memory import much_memory
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import is_inexact

_INT32 = 2**31


def _smallest(op: OpSpec) -> torch.dtype | None:
    """Returns the smallest dtype, which takes the fewest bytes for as many elements."""
    return min(op.dtypes, key=lambda dtype: dtype.itemsize, default=None)


def _few(op: OpSpec) -> list[Sample]:
    return [shaped(op, (2, 3), core=3, dtype=_smallest(op))]


def _block(op: OpSpec) -> list[Sample]:
    return [shaped(op, (1 << 16,), core=4, dtype=_smallest(op))]


@check("far_strides", 6, "32-bit index overflow", Draw(1, range(3, 4097), listed=_few))
def far_strides(case: Case) -> None:
    """Checks a few elements, each dim of each argument in turn with a stride that leads beyond
    2^31.
    """
    args = case.arguments()
    expected = case.call(*args)
    refused = []
    for i, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            continue
        name = case.subject.op.argument_names[i]
        for dim in (d for d in range(value.dim()) if value.shape[d] > 1):
            memory = 1.3 * _INT32 * value.element_size()
            with much_memory(case.device, memory) if case.on_cuda else contextlib.nullcontext():
                what = f"'{name}' with a stride beyond 2^31 in dim {dim}"
                refused += _far_apart(case, args, i, dim, expected, what)
    if refused:
        raise NotRunError(f"the operator refuses such strides: {refused[0]}") from refused[0]


def _far_apart(
    case: Case, args: tuple[Any, ...], position: int, dim: int, expected: tuple[Any, ...], what: str
) -> list[RuntimeError]:
    """Compares one call; returns how the operator refused it, if it did."""
    stretched = [_stretched(v, dim) if i == position else v for i, v in enumerate(args)]
    try:
        actual = case.call(*stretched)
    except RuntimeError as refusal:
        if "CUDA error" in str(refusal):
            raise
        return [refusal]
    case.same(actual, expected, what)
    return []


def _stretched(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the same values, with a stride in a dim so large that the last offset is beyond 2^31.

    The memory in between is never touched, so on a CPU it takes none.
    """
    step = _INT32 // (tensor.shape[dim] - 1) + 64
    try:
        storage = tensor.new_empty(step * (tensor.shape[dim] - 1) + tensor.numel())
    except RuntimeError as error:  # out of memory, or a CPU that must not overcommit
        raise NotRunError("not enough memory for 2^31 elements") from error
    strides = list(tensor.stride())
    strides[dim] = step
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


@check("many_elements", 6, "32-bit index overflow",
       Draw(8, enough=1, numel=range(1 << 8, 4097), listed=_block), devices=("cuda",))  # fmt: skip
def many_elements(case: Case) -> None:
    """Checks more than 2^31 elements: one block over and over, whose result repeats too."""
    if not case.subject.op.tensor_positions:
        raise NotRunError("no argument to grow")
    args = case.arguments()
    expected = case.call(*args)
    tensors = [args[i] for i in _growing(case)] + list(expected)
    if any(not t.dim() or t.shape[0] != tensors[0].shape[0] for t in tensors):
        raise NotRunError("no common outermost dim to grow")
    if not _independent(case):  # sorted along it, for instance
        raise NotRunError("the outermost dim is not one of independent blocks")
    times = _INT32 // max(t.numel() for t in tensors) + 2
    with much_memory(case.device, 2.0 * times * sum(t.nbytes for t in tensors)):
        _repeated(case, args, expected, times)


def _independent(case: Case) -> bool:
    """Tells whether the reference's result for two equal blocks is that for one, twice."""
    if case.subject.reference is None:
        return True
    op, reference = case.subject.op, case.subject.reference
    wide = widened(op, reference, case.sample.make("cpu"))
    one, two = (expected_results(case.subject, _grown(case, wide, times)) for times in (1, 2))
    twice = [_repeat(output, 2) for output in one]
    return all(
        a.shape == b.shape and (torch.allclose(a, b) if is_inexact(a) else torch.equal(a, b))
        for a, b in zip(map(_computed, two), map(_computed, twice), strict=True)
    )


def _computed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns float8 in a dtype that torch can subtract in, and any other tensor as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _growing(case: Case) -> list[int]:
    """Returns the positions of the tensors that have loop dims."""
    op, args = case.subject.op, dict(enumerate(case.sample.args))
    present = [(k, i) for k, i in enumerate(op.tensor_positions) if args.get(i) is not None]
    return [i for k, i in present if group_of(op, k).loops]


def _grown(case: Case, values: Sequence[Any], times: int) -> list[Any]:
    growing = _growing(case)
    return [_repeat(v, times) if i in growing else v for i, v in enumerate(values)]


def _repeat(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))


def _repeated(case: Case, args: tuple[Any, ...], expected: tuple[Any, ...], times: int) -> None:
    actual = case.call(*_grown(case, args, times))
    for block in (0, times // 2, times - 1):
        parts = [a.unflatten(0, (times, -1))[block] for a in actual]
        case.same(parts, expected, f"block {block} of {times} equal ones")


def _tables(op: OpSpec) -> dict[str, list[int]]:
    """Returns the tensors of which an index chooses a row, by their outermost dim."""
    if op.signature is None:
        return {}
    found: dict[str, list[int]] = {}
    kept = {dim for group in op.signature.outputs for dim in group.core}
    for k, i in enumerate(op.tensor_positions):
        group = group_of(op, k)
        if group.core and not group.loops and group.core[0] in op.belows.values():
            found.setdefault(group.core[0], []).append(i)
    return {dim: tables for dim, tables in found.items() if dim not in kept}


def _without_table(subject: Subject, device: str) -> str:
    return "" if _tables(subject.op) else "no index chooses a row of a table"


@check("far_rows", 6, "32-bit index overflow",
       Draw(4, range(1, 4097), enough=1, adapt=plain, listed=_few), devices=("cuda",),
       excuse=_without_table)  # fmt: skip
def far_rows(case: Case) -> None:
    """Checks indices of rows in a table of more than 2^31 elements, of which none but the rows of a
    small table are ever read.
    """
    op, args = case.subject.op, case.arguments()
    for dim, tables in _tables(op).items():
        given = [args[i] for i in tables if args[i] is not None]
        indices = [i for i, name in enumerate(op.argument_names) if op.belows.get(name) == dim]
        chosen = [args[i] for i in indices if args[i] is not None]
        if not chosen or not given or len(given[0]) < 2 or not all(t[0].numel() for t in given):
            continue
        rows = len(given[0])
        step = (_INT32 // max(t[0].numel() for t in given)) // (rows - 1) + 1
        many = step * (rows - 1) + 1
        reach = min(torch.iinfo(one.dtype).max for one in chosen)
        if many not in op.ranges.get(dim, Range(0, many)) or reach < many:
            continue
        if not _chooses_rows(case, tables, indices):
            continue
        for one in chosen:  # each row, the last first
            one.copy_(torch.arange(one.numel()).neg_().sub_(1).remainder_(rows).view(one.shape))
        expected = case.call(*args)
        with much_memory(case.device, 1.2 * many * sum(t[0].nbytes for t in given)):
            spread = _spread_rows(args, tables, indices, step)
            case.same(case.call(*spread), expected, f"rows of '{dim}' that are {step} apart")
        return
    raise NotRunError("no table can have more than 2^31 elements")


def _chooses_rows(case: Case, tables: list[int], indices: list[int]) -> bool:
    """Tells whether the reference's result depends on the chosen rows alone."""
    if case.subject.reference is None:
        return True
    wide = widened(case.subject.op, case.subject.reference, case.sample.make("cpu"))
    one = expected_results(case.subject, wide)
    two = expected_results(case.subject, _spread_rows(wide, tables, indices, 3, fill=1))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _spread_rows(
    args: Sequence[Any], tables: list[int], indices: list[int], step: int, fill: float | None = None
) -> list[Any]:
    """Returns the arguments with that many rows between those of each table, and the indices that
    choose the same.
    """

    def spread(i: int, value: Any) -> Any:
        if i in tables and value is not None:
            large = value.new_empty((step * (len(value) - 1) + 1, *value.shape[1:]))
            if fill is not None:
                large.fill_(fill)
            large[::step] = value
            return large
        return value * step if i in indices and value is not None else value

    return [spread(i, value) for i, value in enumerate(args)]
