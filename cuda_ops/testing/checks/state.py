"""Class 2: what an operator keeps from one call for the next."""

from __future__ import annotations

from dataclasses import replace

import torch

from cuda_ops.testing.case import NO_TENSOR, Case, NotRunError, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.guards import guard
from cuda_ops.testing.poison import POISONS, poisoned
from cuda_ops.testing.tolerance import same_bits


@check("state", 2, "the result is that of an earlier call", Draw(2, range(1, 4097)),
       quick=True)  # fmt: skip
def state(case: Case) -> None:
    """Checks that a call sees new values in the memory of the call before, one argument at a time.
    A cache that knows tensors by their address does not, after each step of an optimizer.
    """
    sample = case.sample
    places = [i for i, v in enumerate(case.arguments()) if isinstance(v, torch.Tensor)]
    if not places:
        raise NotRunError(NO_TENSOR)
    # All stay until the end: in memory that was given back, a cache of the operator may know the
    # very values that it should not have.
    held = []
    # Memory around the arguments and fresh memory hold the same each time: other checks find
    # operators that depend on them.
    with poisoned(case.device, POISONS[0]):
        for i in places:
            args, guards = guard(case.arguments(), POISONS[0])
            held.append(guards)
            first = case.call(*args)
            args[i].copy_(replace(sample, seed=sample.seed + 1).make(case.device)[i])
            again = case.call(*args)
            moved, guards = guard(tuple(args), POISONS[0])
            held.append(guards)
            expected = case.call(*moved)
            if not all(map(same_bits, again, first)):  # it saw them; other checks ask how
                continue
            name = case.subject.op.argument_names[i]
            case.same(again, expected, f"'{name}' got other values in the same memory")
