"""Sizes beyond those that are drawn: what is right for 4096 elements may be wrong for more."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import LARGEST_NUMEL, MAX_NUMEL, Sample, TensorArg
from cuda_ops.testing.sizes import (
    ROWS,
    grown,
    most_elements,
    resizable,
    shaped,
    widest_floating,
    within_ranges,
)

#: Past a block of threads, past what is drawn, past 48 KiB of float32, and on either side of the
#: most blocks that y and z of a grid may have.
_SIZES = (1025, 4097, 12289, 65536, 65537)
#: Rows: more than 16 bits count, in one dim and in several, and nearly as many as there may be.
_LOOPS = ((65537,), (70_000, 2), (3, 65536), (1, 1, 65537), (1021, 1025))
#: How many times the tolerance is allowed: it holds for thousands of numbers, and among a million
#: there are some that cancel further. A number of another place is off by more.
TOLERATED = 4
#: Seconds of the processor that a sample may take, and sizes to foretell them from.
_PATIENCE, _PROBES = 2.0, (1025, 4097)


def _each_dim_large(op: OpSpec) -> list[Sample]:
    """Returns calls in which rows are many, and each named core dim is long in turn, as far as the
    operator takes such sizes.
    """
    dims = [dim for dim in resizable(op) if dim != ROWS]
    kinds: list[tuple[tuple[int, ...], dict[str, int]]] = []
    if op.tensor_positions:
        kinds += [(loop, dict.fromkeys(dims, 5)) for loop in _LOOPS]
    few = (2,) if op.tensor_positions else ()
    kinds += [(few, dict.fromkeys(dims, 3) | {dim: size}) for dim in dims for size in _SIZES]
    samples = [
        shaped(op, loop, core=core, dtype=dtype)
        for dtype in dict.fromkeys((widest_floating(op), None))
        for loop, core in kinds
        if _is_large(op, loop, core)
    ]
    return list({repr(sample): sample for sample in samples}.values())


def _is_large(op: OpSpec, loop: tuple[int, ...], core: dict[str, int]) -> bool:
    """Tells whether the operator takes these sizes, and they make tensors larger than drawn ones,
    yet small enough for a reference in float64.
    """
    most = most_elements(op, loop, core) if within_ranges(op, core) else math.inf
    return most <= LARGEST_NUMEL and (most > MAX_NUMEL or max(core.values(), default=0) > 1024)


def _own_grown(op: OpSpec, sample: Sample) -> list[Sample]:
    """Returns an operator's own sample with each dim large in turn."""
    wanted = grown(op, sample, dict.fromkeys(resizable(op), _SIZES) | {ROWS: _LOOPS[0]})
    sizes = [max((math.prod(arg.shape) for arg in one.tensors), default=0) for one in wanted]
    pairs = zip(wanted, sizes, strict=True)
    return [one for one, size in pairs if MAX_NUMEL < size <= LARGEST_NUMEL]


@check("large", None, "wrong for large sizes", quick=True,
       draw=Draw(8, range(MAX_NUMEL + 1, LARGEST_NUMEL + 1), listed=_each_dim_large,
                 grown=_own_grown, kernels=True))  # fmt: skip
def large(case: Case) -> None:
    """Compares rows of 1,025 to 65,537 and 70,000 rows with the reference; where that is this very
    kernel, with the same rows a few at a time. An operator whose arguments the signature line does
    not make is called with the large ones among its own samples.
    """
    _expect_affordable(case)
    actual = case.call(*case.arguments())
    worst = deviation(case.subject, case.sample, actual)
    assert worst <= TOLERATED, worst.text
    if case.subject.is_its_own_reference(case.device):
        _compare_pieces(case, actual)


def _expect_affordable(case: Case) -> None:
    """Foretells from smaller sizes how long the sample takes.

    Raises:
        NotRunError: much too long, as where time grows with the square of a size.
    """
    longest = max((size for arg in case.sample.tensors for size in arg.shape), default=0)
    if longest <= _PROBES[-1]:
        return
    try:
        _seconds(case, 16)  # a first call loads and warms up
        first, second = (min(_seconds(case, size) for _ in range(2)) for size in _PROBES)
    except Exception:  # sizes that depend on each other cannot be cut one by one
        return
    power = max(1.0, math.log(second / first) / math.log(_PROBES[1] / _PROBES[0]))
    if (expected := second * (longest / _PROBES[1]) ** power) > _PATIENCE:
        raise NotRunError(f"{longest} in one dim would take {expected:.0f} s")


def _seconds(case: Case, most: int) -> float:
    """Returns how long operator and reference take if no dim is larger than ``most``."""

    def cut(arg: TensorArg) -> TensorArg:
        below = arg.below if arg.below is None else min(arg.below, most)
        return replace(arg, shape=tuple(min(size, most) for size in arg.shape), below=below)

    sample = case.sample.with_tensors(cut)
    start = time.process_time()  # other programs may have the processor meanwhile
    deviation(case.subject, sample, case.call(*sample.make(case.device)))
    return time.process_time() - start


def _compare_pieces(case: Case, actual: tuple[torch.Tensor, ...]) -> None:
    """Compares with calls of a few rows: the reference makes the kernel's own mistakes."""
    op, args = case.subject.op, case.arguments()
    if op.signature is None:  # nothing says what rows are
        return
    groups = (*op.signature.inputs, *op.signature.outputs)
    tensors = [args[i] for i in op.tensor_positions]
    rows = tensors[0].shape[:1] if tensors else ()
    if op.random or op.written or not all(group.loops for group in groups):
        return
    if not rows or any(t is None or t.shape[:1] != rows for t in (*tensors, *actual)):
        return
    # Compared with a share of the rows at the start, in the middle and at the end.
    step = max(1, rows[0] * MAX_NUMEL // max(t.numel() for t in (*tensors, *actual)))
    for start in {0, rows[0] // 2, rows[0] - step}:
        part = [v[start : start + step] if i in op.tensor_positions else v
                for i, v in enumerate(args)]  # fmt: skip
        expected = case.call(*part)
        found = [output[start : start + step] for output in actual]
        case.same(found, expected, f"rows from {start} on are not the result of these alone")
