"""Class 15: outputs that are not written everywhere, temporaries that are read too late."""

from __future__ import annotations

from cuda_ops.testing.case import Case, check
from cuda_ops.testing.checks.races import nondeterministic
from cuda_ops.testing.compare import same_bits
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.poison import POISONS, poisoned


@check("unwritten", 15, "unwritten output or lifetime of temporaries", Draw(6, range(1, 4097)),
       quick=True, excuse=nondeterministic)  # fmt: skip
def unwritten(case: Case) -> None:
    """Checks that the result is the same whatever the allocated memory held before."""
    args = case.arguments()
    results = []
    for byte in POISONS:
        with poisoned(case.device, byte):
            results.append([output.clone() for output in case.call(*args)])
    for k, (a, b) in enumerate(zip(*results, strict=True)):
        assert same_bits(a, b), (
            f"output {k} changes with what was in memory before: not every element is written, "
            "or something is read that was not written"
        )
