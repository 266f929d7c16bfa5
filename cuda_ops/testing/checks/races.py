"""Class 2: races and missing barriers, as far as repeating a call shows them.

``pytest --cuda-ops --sanitize`` looks for the rest with racecheck and synccheck; the time limit of
every check reports a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.arguments import each
from cuda_ops.testing.case import Case, NotRunError, OtherMistakeError, check, nondeterministic
from cuda_ops.testing.compare import outputs
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.early_copy import LEAST_CAPABILITY, early_copy
from cuda_ops.testing.guards import guard
from cuda_ops.testing.poison import POISONS, poisoned
from cuda_ops.testing.samples import LARGEST_NUMEL, Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.tolerance import same_bits, tensors

_CALLS = 20


def _several_blocks(op: OpSpec) -> list[Sample]:
    """Returns calls of one block, of a few, of as many as a GPU runs at once, and of more blocks of
    larger rows, which each may have to do several of.
    """
    kinds = [((1,), 33), ((5,), 33), ((1 << 15,), 2), ((512,), 33)]
    made = [shaped(op, loop, core=core) for loop, core in kinds]
    return [sample for sample in made if sample.numel <= LARGEST_NUMEL]


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


def expect_same_whatever_is(
    around: str, case: Case, results: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Compares two results of the sample's call, made with other bytes in memory that is not the
    operator's.

    Raises:
        OtherMistakeError: they differ as much with the same bytes in it.
        AssertionError: they differ.
    """
    if not case.subject.claims.deterministic or all(map(same_bits, *results)):
        return
    try:
        repeats.body(case)  # larger samples come here than there
    except AssertionError as failure:
        raise OtherMistakeError(str(failure), repeats.title) from None
    k = [same_bits(a, b) for a, b in zip(*results, strict=True)].index(False)
    raise AssertionError(f"output {k} changes with memory {around}")


#: Bytes between the starts of tensors in one buffer, as torch's allocator aligns them.
_APART = 512


def _in_one(args: Sequence[Any], buffer: torch.Tensor) -> list[Any]:
    """Returns the arguments, tensors as views of the bytes of a buffer."""
    taken = 0

    def view(value: Any) -> Any:
        nonlocal taken
        if not isinstance(value, torch.Tensor):
            return value
        part = buffer[taken : taken + value.nbytes].view(value.dtype)
        taken += _room(value)
        return part.view(value.shape)

    return [each(view, value) for value in args]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _APART) * _APART


@check("early_start", 2, "races, missing barriers, deadlocks", Draw(3, range(64, 4097)),
       devices=("cuda",))  # fmt: skip
def early_start(case: Case) -> None:
    """Checks that a kernel that starts before the end of the one in front of it, by programmatic
    dependent launch, waits for what that one writes.
    """
    if torch.cuda.get_device_capability(case.device) < LEAST_CAPABILITY:
        raise NotRunError("kernels start early from compute capability 9.0 on")
    op, args = case.subject.op, case.arguments()
    expected = case.call(*args)
    size = sum(map(_room, tensors(args)))
    bytes_, late = (torch.zeros(size, dtype=torch.uint8, device=case.device) for _ in range(2))
    for value, copy in zip(tensors(args), tensors(_in_one(args, bytes_)), strict=True):
        copy.copy_(value)
    values = _in_one(args, late)
    torch.cuda.synchronize()
    early_copy(late, bytes_)
    found = case.operator(*values)  # nothing in between
    written = tensors([values[i] for i in op.written if i < len(values)])
    found = [*(outputs(found) if op.parsed.returns else ()), *written]
    case.same(found, expected, "a start before the end of the kernel that writes its inputs")
