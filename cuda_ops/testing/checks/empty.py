"""Class 12: empty inputs, for which a grid of 0 blocks is an error that shows up elsewhere."""

from __future__ import annotations

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check, sums, wanting
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample, may_be_empty
from cuda_ops.testing.sizes import resizable, resized, shaped

_LOOP = (3, 4)


def each_dim_empty(op: OpSpec) -> list[Sample]:
    """Returns calls in which each loop dim and each named core dim is empty in turn, the other core
    dims of odd sizes and of even ones in 16 bits, which often have kernels of their own.
    """
    assert op.signature is not None
    short = next((d for d in (torch.float16, torch.bfloat16) if d in op.dtypes), None)
    loops = [(0,), *(tuple(0 if i == d else s for i, s in enumerate(_LOOP)) for d in range(2))]
    samples = []
    for size, dtype in ((5, None), (64, short)):
        core = dict.fromkeys(op.drawn_dims, size)
        samples += [
            shaped(op, loop, core=core, dtype=dtype) for loop in loops if op.tensor_positions
        ]
        samples += [
            shaped(op, _LOOP, core={**core, dim: 0}, dtype=dtype)
            for dim in sorted(may_be_empty(op))
        ]
    return samples


def _own_emptied(op: OpSpec, sample: Sample) -> list[Sample]:
    """Returns an operator's own sample with each dim empty in turn, if no index counts in it."""
    made = [resized(op, sample, dim, 0) for dim in resizable(op)]
    return [one for one in made if one is not None and not _index_nothing(sample, one)]


def _index_nothing(before: Sample, after: Sample) -> bool:
    emptied = {
        size
        for was, now in zip(before.tensors, after.tensors, strict=True)
        for size, left in zip(was.shape, now.shape, strict=True)
        if left < size
    }
    return any(arg.below in emptied and 0 not in arg.shape for arg in after.tensors)


@check("empty", 12, "empty input", quick=True,
       draw=Draw(4, range(1), listed=each_dim_empty, grown=_own_emptied,
                 grown_from=4))  # fmt: skip
def empty(case: Case) -> None:
    """Checks that result and shapes of gradients are right, and that the device is unharmed."""
    result = case.call(*case.arguments())
    worst = deviation(case.subject, case.sample, result)
    assert worst <= 1, worst.text
    leaves = case.leaves()
    if case.subject.gradient == "declared" and wanting(leaves):
        wanted = wanting(leaves)
        found = torch.autograd.grad(sums(case.call(*leaves)), wanted, allow_unused=True)
        pairs = zip(wanted, filter(torch.is_tensor, found), strict=False)
        shapes = [(leaf.shape, gradient.shape) for leaf, gradient in pairs]
        assert all(a == b for a, b in shapes), f"inputs and their gradients have shapes {shapes}"
    unrelated = torch.ones(3, device=case.device).sum().item()
    assert unrelated == 3, "an unrelated operator is wrong afterwards"
