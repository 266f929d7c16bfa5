"""Class 3, once more: reads and writes beside what an operator allocates for itself."""

from __future__ import annotations

import contextlib
from functools import partial

from cuda_ops.spec import OpSpec
from cuda_ops.testing.allocations import allocations, fenced, recorded
from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.checks.races import expect_same_whatever_is
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.memory import much_memory
from cuda_ops.testing.poison import POISONS
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import most_elements, shaped

#: Most elements of all that a call has.
_MOST = 1 << 20
#: From so many elements on, a call may take up to this much memory, in bytes, and is left out where
#: it takes more: it may grow with the square of a size.
_LARGE, _MEMORY = 1 << 15, 4e9


def _in_parts(op: OpSpec) -> list[Sample]:
    """Returns calls that need several blocks, in rows, in one long row, and with thousands of rows
    that are not dense: for such calls kernels keep partial results.
    """
    if not op.tensor_positions:
        return []
    found = [shaped(op, (3, 257)), shaped(op, (9001, 3), layout="padded")]
    if op.drawn_dims:
        long = dict.fromkeys(op.drawn_dims, 100_003)
        found += [shaped(op, (), core=long)] if most_elements(op, (), long) <= _MOST else []
        found.append(shaped(op, (5,), core=1000))
    else:
        found.append(shaped(op, (100_003,)))
    return [sample for sample in found if sample.numel <= _MOST]


@check("workspaces", 3, "out-of-bounds access", Draw(4, range(1, 4097), beside=_in_parts),
       devices=("cuda",))  # fmt: skip
def workspaces(case: Case) -> None:
    """Checks that the memory around all that the operator allocates is unused and unchanged: its
    workspaces and copies too. A first call shows how much it allocates, and the next ones get that
    between guard zones.
    """
    large = case.sample.numel >= _LARGE
    with much_memory(case.device, _MEMORY) if large else contextlib.nullcontext():
        _call_between_fences(case)


def _call_between_fences(case: Case) -> None:
    _, events = recorded(case.device, partial(case.call, *case.arguments()))
    sizes = [one.size for one in allocations(events)]
    if not any(sizes):
        raise NotRunError("the operator allocates no memory")
    results = []
    for byte in POISONS:
        call = partial(case.call, *case.arguments())
        with fenced(case.device, sizes, byte, POISONS[0]) as fences:
            outputs, events = recorded(case.device, call)
        where = fences.written(allocations(events))
        del fences  # its pool may not end while another one is in use
        assert not where, f"memory was written {where} bytes that the operator had allocated"
        results.append([output.clone() for output in outputs])
    expect_same_whatever_is("around what the operator allocates", case, results)
