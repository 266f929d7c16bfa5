"""Class 14: unchecked launches, and the limits of a grid."""

from __future__ import annotations

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped

#: More blocks than the 65,535 that y and z of a grid may have, and a prime.
_MANY = 65_537


def _each_batch_dim_large(op: OpSpec) -> list[Sample]:
    if not op.tensor_positions:
        few = dict.fromkeys(op.drawn_dims, 2)
        return [shaped(op, (), core=few | {dim: _MANY}) for dim in few]
    return [shaped(op, loop, core=2) for loop in ((_MANY,), (_MANY, 2), (2, _MANY), (1, 1, _MANY))]


@check("launches", 14, "unchecked launch or resource limits", devices=("cuda",),
       draw=Draw(2, range(_MANY, 2 * _MANY), listed=_each_batch_dim_large))  # fmt: skip
def launches(case: Case) -> None:
    """Checks 65,537 in every batch dim: right, or an error; an unchecked launch leaves garbage."""
    worst = deviation(case.subject, case.sample, case.call(*case.arguments()))
    assert worst <= 1, worst.text
