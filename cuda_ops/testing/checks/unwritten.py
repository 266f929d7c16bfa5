"""Class 15: outputs that are not written everywhere, temporaries that are read too late."""

from __future__ import annotations

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check, nondeterministic
from cuda_ops.testing.checks.empty import each_dim_empty
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.poison import POISONS, poisoned
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.tolerance import same_bits


def _several_and_none(op: OpSpec) -> list[Sample]:
    """Returns calls with more elements than a block of threads has, and calls without any: the sum
    of an empty row must be written too.
    """
    several = [(3, 7), (3, 257)] if op.tensor_positions else [()]
    return each_dim_empty(op) + [shaped(op, loop, core=5) for loop in several]


#: How often a call runs with each byte once a result differs: in turns, as a race that goes the
#: same way a few times looks like memory that was not written.
_TURNS = 4


@check("unwritten", 15, "unwritten output or lifetime of temporaries", quick=True,
       draw=Draw(6, range(1, 4097), beside=_several_and_none), excuse=nondeterministic)  # fmt: skip
def unwritten(case: Case) -> None:
    """Checks that the result is the same whatever the allocated memory held before."""
    args = case.arguments()
    runs: list[list[list[torch.Tensor]]] = [[], []]
    for turn in range(_TURNS):
        for results, byte in zip(runs, POISONS, strict=True):
            with poisoned(case.device, byte):
                results.append([output.clone() for output in case.call(*args)])
        if turn == 0 and all(map(same_bits, runs[0][0], runs[1][0])):
            return
    for k, (a, b) in enumerate(zip(runs[0][0], runs[1][0], strict=True)):
        # What differs by itself, ``repeats`` reports.
        by_itself = any(not same_bits(one[k], results[0][k]) for results in runs for one in results)
        assert by_itself or same_bits(a, b), (
            f"output {k} changes with what was in memory before: not every element is written, "
            "or something is read that was not written"
        )
