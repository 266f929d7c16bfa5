"""Class 2: races and missing barriers, as far as repeating a call shows them.

``pytest --cuda-ops --sanitize`` looks for the rest with racecheck and synccheck; the time limit of
every check reports a deadlock.
"""

from __future__ import annotations

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import same_bits
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.guards import guard
from cuda_ops.testing.poison import POISONS, poisoned
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.subject import Subject

_CALLS = 20


def _several_blocks(op: OpSpec) -> list[Sample]:
    """Returns calls of one block, of a few, and of as many as a GPU runs at once."""
    return [shaped(op, loop, core=core) for loop, core in (((1,), 33), ((5,), 33), ((1 << 16,), 2))]


def nondeterministic(subject: Subject, device: str) -> str:
    """Returns why bits cannot be compared; empty if they can."""
    return "" if subject.claims.deterministic else f"no such claim: {subject.claims.reason}"


@check("repeats", 2, "races, missing barriers, deadlocks",
       Draw(3, listed=_several_blocks), quick=True,
       excuse=nondeterministic)  # fmt: skip
def repeats(case: Case) -> None:
    """Checks that the same call gives the same bits, again and again."""
    # Memory around the arguments and fresh memory hold the same each time: other checks find
    # operators that depend on them.
    args, _guards = guard(case.arguments(), POISONS[0])
    with poisoned(case.device, POISONS[0]):
        first, *others = [case.call(*args) for _ in range(_CALLS)]
    for i, result in enumerate(others, 2):
        for k, (a, b) in enumerate(zip(first, result, strict=True)):
            assert same_bits(a, b), (
                f"output {k} of call {i} differs from that of the first, with the same arguments; "
                "if it may, say so in cuda_ops_claims"
            )
