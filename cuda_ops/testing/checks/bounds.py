"""Class 3: reads and writes outside of the tensors, on tails or at bad indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.checks.races import expect_same_whatever_is
from cuda_ops.testing.compare import deviation, widened
from cuda_ops.testing.draw import Draw, chosen
from cuda_ops.testing.guards import behind, guard, rounded_by_malloc
from cuda_ops.testing.poison import POISONS, poisoned
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import same_bits


def _tails(op: OpSpec) -> list[Sample]:
    """Returns calls of sizes that fill no vector, warp or block: allocators leave room behind."""
    sizes = (1, 2, 3, 5, 13, 33, 257) if op.tensor_positions else ()
    return [shaped(op, (size,), core=3) for size in sizes]


#: glibc keeps up to seven freed pieces of a size for each thread.
_KEPT = 16
_TRIES = 3


@check("bounds", 3, "out-of-bounds access", Draw(8, range(1, 4097), beside=_tails), quick=True)
def bounds(case: Case) -> None:
    """Checks that guard zones around inputs and behind outputs are unused and unchanged."""
    check_bounds(case)


def check_bounds(case: Case) -> None:
    """Calls the operator between guard zones.

    Raises:
        AssertionError: it has used or changed one.
    """
    results = []
    for byte in POISONS:
        args, guards = guard(case.arguments(), byte)
        with poisoned(case.device, POISONS[0]):
            outputs, written = _written_behind(case, args)
            for _ in range(0 if case.on_cuda else _TRIES):
                if written is None:
                    break
                # What glibc hands out again may have its last owner's bytes behind it; what writes
                # there writes in each call.
                _fill_free_memory(outputs)
                outputs, written = _written_behind(case, args)
            assert written is None, f"memory behind output {written} was written"
            results.append([output.clone() for output in outputs])
        for i, zones in guards.items():
            name = case.subject.op.argument_names[i]
            assert zones.intact(), f"memory around argument '{name}' was written"
    expect_same_whatever_is("around the arguments", case, results)


def _written_behind(case: Case, args: Sequence[Any]) -> tuple[tuple[torch.Tensor, ...], int | None]:
    """Calls the operator in poisoned memory; returns its outputs, and the first one behind which
    memory has changed.
    """
    # Not every C library fills what lies behind an allocation.
    control = behind(torch.empty(3, device=case.device))
    filled = case.on_cuda or (control is not None and _is_filled(control))
    allocations = _allocations(case)
    outputs = case.call(*args)
    # An output may get a temporary's memory, and then has its remains behind it.
    reused = _allocations(case) - allocations > len(outputs)
    for k, output in enumerate(outputs):
        elsewhere = output.device.type != torch.device(case.device).type
        zone = None if reused or elsewhere or not filled else behind(output)
        if zone is not None and not _is_filled(zone):
            return outputs, k
    return outputs, None


def _fill_free_memory(outputs: Sequence[torch.Tensor]) -> None:
    """Fills what the C library's allocator keeps for tensors as large as these."""
    sizes = [rounded_by_malloc(output.untyped_storage().nbytes()) for output in outputs]
    filled = [torch.full((n,), POISONS[0], dtype=torch.uint8) for n in sizes for _ in range(_KEPT)]
    del filled


def _is_filled(zone: torch.Tensor) -> bool:
    return bool((zone == POISONS[0]).all())


def _allocations(case: Case) -> int:
    """Returns how many allocations CUDA's caching allocator has made; 0 on a CPU."""
    statistics = torch.cuda.memory_stats(case.device) if case.on_cuda else {}
    return int(statistics.get("allocation.all.allocated", 0))


_NO_INDEX = "no index tensors: no TensorArg(below=...) in its samples"
#: Dtypes that callers pass instead of the one that is meant. Kernels that take the dtype for
#: granted read past the end of the narrower ones.
_MISTAKEN = {
    torch.int64: (torch.int32, torch.int16, torch.uint8),
    torch.int32: (torch.int64, torch.int16),
    torch.bool: (torch.uint8,),
}


def _no_index(subject: Subject, device: str) -> str:
    samples = [] if subject.strategy is None else chosen(subject, Draw(3, range(1, 4097)))
    tensors = [arg for sample in samples for arg in sample.tensors]
    indexed = any(arg.below is not None or _is_mask(arg) for arg in tensors)
    return "" if indexed else _NO_INDEX


def _beyond_signed_bytes(op: OpSpec) -> list[Sample]:
    """Returns a call in which an index of unsigned bytes may have the highest bit set."""
    if not any(torch.uint8 in op.allowed_dtypes(name) for name in op.belows):
        return []

    def in_bytes(arg: TensorArg) -> TensorArg:
        return arg if arg.below is None else replace(arg, dtype=torch.uint8)

    return [shaped(op, (6,), core=200).with_tensors(in_bytes)]


@check("indices", 3, "out-of-bounds access by an index",
       Draw(6, range(1, 4097), beside=_beyond_signed_bytes), excuse=_no_index)  # fmt: skip
def indices(case: Case) -> None:
    """Checks indices at the last element, all the same, outside, and of another dtype, which masks
    are tried in too: a right result or an error.
    """
    at = [i for i, arg in enumerate(case.sample.args) if getattr(arg, "below", None) is not None]
    masks = [i for i, arg in enumerate(case.sample.args) if _is_mask(arg)]
    if not at and not masks:
        raise NotRunError(_NO_INDEX)
    for i in (*at, *masks):
        for dtype in _MISTAKEN.get(case.sample.args[i].dtype, ()):
            _is_right_or_refused(case, i, dtype)
    for i in at:
        name, below = case.subject.op.argument_names[i], case.sample.args[i].below
        for value in (below - 1, 0):
            what = f"'{name}' filled with {value}"
            if case.sample.args[i].distinct:
                what += " and the next ones" if value == 0 else " and those before"
            _is_right(case, i, value, what)
        limits = torch.iinfo(case.sample.args[i].dtype)
        for value in (-1, below):
            if not limits.min <= value <= limits.max:
                continue
            _stays_inside(case, i, value, f"'{name}' filled with {value}, outside of {below},")


def _is_mask(arg: Any) -> bool:
    return isinstance(arg, TensorArg) and arg.dtype == torch.bool


def _is_right_or_refused(case: Case, position: int, dtype: torch.dtype) -> None:
    """Checks a call with an index or a mask of another dtype, if that holds its values."""
    args = case.arguments()
    if not torch.equal(args[position].to(dtype).to(args[position].dtype), args[position]):
        return
    what = f"'{case.subject.op.argument_names[position]}' in {dtype}"
    results = []
    for byte in POISONS:
        changed = [v.to(dtype) if i == position else v for i, v in enumerate(case.arguments())]
        guarded, guards = guard(tuple(changed), byte)
        try:
            results.append([output.clone() for output in case.call(*guarded)])
        except (RuntimeError, IndexError, ValueError, TypeError) as refusal:
            if "CUDA error" in str(refusal):
                raise
            return
        assert all(zones.intact() for zones in guards.values()), f"{what} writes out of bounds"
    assert all(map(same_bits, *results)) or not case.subject.claims.deterministic, (
        f"{what} reads out of bounds"
    )
    worst = deviation(case.subject, case.sample, results[0])
    assert worst <= 1, f"{what}: {worst.text}"


def _filled(args: tuple[Any, ...] | list[Any], position: int, value: int) -> tuple[Any, ...]:
    filled = torch.full_like(args[position], value)
    return tuple(filled if i == position else v for i, v in enumerate(args))


def _at(args: tuple[Any, ...] | list[Any], position: int, value: int, distinct: bool) -> Any:
    """Returns the arguments with indices that are all this one; or else this, and its neighbors
    inside.
    """
    filled = _filled(args, position, value)
    if distinct:
        order = torch.arange(filled[position].numel(), device=filled[position].device)
        filled[position].add_((order if value == 0 else -order).view(filled[position].shape))
    return filled


def _is_right(case: Case, position: int, value: int, what: str) -> None:
    distinct = case.sample.args[position].distinct
    actual = case.call(*_at(case.arguments(), position, value, distinct))
    op, reference = case.subject.op, case.subject.reference
    wide = list(_at(widened(op, reference, case.sample.make("cpu")), position, value, distinct))
    worst = deviation(case.subject, case.sample, actual, wide)
    assert worst <= 1, f"{what}: {worst.text}"


def _stays_inside(case: Case, position: int, value: int, what: str) -> None:
    """Checks that nothing outside is read or written; any result or refusal will do."""
    results = []
    for byte in POISONS:
        args, guards = guard(_filled(case.arguments(), position, value), byte)
        try:
            results.append([output.clone() for output in case.call(*args)])
            if case.on_cuda:
                torch.cuda.synchronize()
        except (RuntimeError, IndexError, ValueError) as refusal:
            if "device-side assert" in str(refusal):
                raise NotRunError(f"{what} ends the process by a device-side assert") from refusal
            if "CUDA error" in str(refusal):
                raise
            results.append([])
        assert all(zones.intact() for zones in guards.values()), f"{what} writes out of bounds"
    first, second = results
    assert len(first) == len(second) and all(map(same_bits, first, second)), (
        f"{what} reads out of bounds"
    )
