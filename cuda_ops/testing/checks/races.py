"""Class 2: races and missing barriers, as far as repeating a call shows them.

``pytest --cuda-ops --sanitize`` looks for the rest with racecheck and synccheck; a deadlock is
what the time limit of every check reports.
"""

from __future__ import annotations

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import same_bits
from cuda_ops.testing.draw import Draw, ordinary
from cuda_ops.testing.samples import Sample, shaped
from cuda_ops.testing.subject import Subject

_CALLS = 20


def _several_blocks(op: OpSpec) -> list[Sample]:
    """A block, a few, as many as a GPU runs at once."""
    return [shaped(op, loop, core=core) for loop, core in (((1,), 33), ((5,), 33), ((1 << 16,), 2))]


def nondeterministic(subject: Subject, device: str) -> str:
    """For checks that compare bits."""
    return "" if subject.claims.deterministic else f"no such claim: {subject.claims.reason}"


@check("repeats", 2, "races, missing barriers, deadlocks",
       Draw(3, adapt=ordinary, listed=_several_blocks), quick=True,
       excuse=nondeterministic)  # fmt: skip
def repeats(case: Case) -> None:
    """The same call gives the same bits, again and again."""
    args = case.arguments()
    first = case.call(*args)
    for i in range(1, _CALLS):
        for k, (a, b) in enumerate(zip(first, case.call(*args), strict=True)):
            assert same_bits(a, b), (
                f"output {k} of call {i + 1} differs from that of the first, with the same "
                "arguments; if it may, say so in cuda_ops_claims"
            )
