"""Class 15: temporaries that are freed too early, of operators that copy strided tensors first."""

from __future__ import annotations

import contextlib

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.allocations import SMALL
from cuda_ops.testing.backward import backward, differentiable, stepped
from cuda_ops.testing.case import Case, NotRunError, called, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.poison import POISONS, poisoned
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import most_elements, shaped

_TITLE = "unwritten output or lifetime of temporaries"


def _beyond_caches(op: OpSpec) -> list[Sample]:
    """Returns a call with more bytes than glibc keeps for a thread, which it fills once freed."""
    return [shaped(op, (40,), core=40)] if op.tensor_positions else []


@check("temporaries", 15, _TITLE,
       Draw(4, range(1, 4097), beside=_beyond_caches), quick=True)  # fmt: skip
def temporaries(case: Case) -> None:
    """Checks that strided arguments give the same whatever memory held before, and so do strided
    gradients. ``layouts`` would find these mistakes too, and give them the wrong name.
    """
    leaves = case.leaves() if case.subject.gradient == "declared" else case.arguments()
    case.call(*leaves)  # what is refused contiguous is no matter of strides
    args = tuple(stepped(v) if isinstance(v, torch.Tensor) else v for v in leaves)
    if (found := called(case, args)) is None:
        raise NotRunError("the operator refuses strided inputs")
    gradients = [stepped(torch.full_like(out, 0.5)) for out in differentiable(found)]
    runs: list[list[torch.Tensor]] = []
    for byte in POISONS:
        with poisoned(case.device, byte):  # what the operator allocates, and no argument
            results = list(case.call(*args))
            if outputs := differentiable(results):
                with contextlib.suppress(RuntimeError):  # which checks of gradients report
                    results += backward(outputs, args, gradients)
            runs.append([result.detach().clone() for result in results])
    what = "strided tensors give a result that changes with what was in memory before"
    case.same(runs[0], runs[1], what)


#: Elements of a core dim that are more than that in any dtype, rows of them, and all that is made.
_LONG, _ROWS, _MOST = SMALL + 64, 12, 1 << 24


def _many_blocks(op: OpSpec) -> list[Sample]:
    """Returns a call with as many elements as small memory holds, and one that has a copy and a
    result of another size in large memory: blocks enough that the last ones start when the first
    have written.
    """
    dtype = min(op.dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    cores = (64, 32, 16, 8, 4)
    rows = (SMALL // (core * dtype.itemsize) for core in cores)
    sizes = [shaped(op, (n,), core=core, dtype=dtype) for n, core in zip(rows, cores, strict=True)]
    small = [one for one in sizes if one.numel * dtype.itemsize <= SMALL][:1]
    long = dict.fromkeys(op.drawn_dims, _LONG)
    if not long or most_elements(op, (_ROWS,), long) > _MOST:
        return small
    return [*small, shaped(op, (_ROWS,), core=_LONG, dtype=dtype)]


@check("freed_copies", 15, _TITLE,
       Draw(4, enough=1, numel=range(1 << 8, 4097), listed=_many_blocks),
       devices=("cuda",))  # fmt: skip
def freed_copies(case: Case) -> None:
    """Checks that each strided argument in turn gives what a contiguous one does, in so many blocks
    that the first have written their results before the last read: the memory of a copy that is
    freed before the kernel is launched becomes that of a result.
    """
    args = case.arguments()
    expected = case.call(*args)
    for i, value in enumerate(args):
        if not isinstance(value, torch.Tensor) or i in case.subject.op.written:
            continue
        strided = (*args[:i], stepped(value), *args[i + 1 :])
        with poisoned(case.device, POISONS[0]):
            found = called(case, strided)
        if found is not None:
            name = case.subject.op.argument_names[i]
            case.same(found, expected, f"'{name}' strided gives another result than contiguous")
