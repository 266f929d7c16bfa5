"""Class 2: what the threads of one call on a CPU share."""

from __future__ import annotations

import time

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.tolerance import same_bits

#: More threads than most machines have cores for, which then take turns in the middle of rows.
_THREADS = 8
#: How long they go on, in seconds, and for how many calls at most.
_DURATION, _MOST = 0.3, 50
#: Rows, and the size of core dims, of which a loop has something for each thread; and elements at
#: most, where there are several core dims.
_SIZES, _ELEMENTS = ((1 << 14, 12), (1 << 10, 64)), 1 << 18


def _many_rows(op: OpSpec) -> list[Sample]:
    def made(rows: int, core: int) -> Sample:
        sample = shaped(op, (rows,), core=core)
        fewer = max(1, rows * _ELEMENTS // max(1, sample.numel))
        return sample if fewer >= rows else shaped(op, (fewer,), core=core)

    return [made(rows, core) for rows, core in _SIZES]


@check("parallel", 2, "threads of one call disturb each other", Draw(2, listed=_many_rows),
       devices=("cpu",), quick=True)  # fmt: skip
def parallel(case: Case) -> None:
    """Checks that a CPU's threads together give what one alone gives, such as where a parallel loop
    has scratch memory that all its parts use.
    """
    args, before = case.arguments(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = case.call(*args)
        torch.set_num_threads(_THREADS)
        end = time.monotonic() + _DURATION
        for i in range(_MOST):
            if i and time.monotonic() > end:
                break
            found = case.call(*args)
            if not all(map(same_bits, found, expected)):  # which is quicker to ask
                case.same(found, expected, f"{_THREADS} threads give another result than one")
    finally:
        torch.set_num_threads(before)
