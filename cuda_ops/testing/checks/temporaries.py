"""Class 15: temporaries that are freed too early, of operators that copy strided tensors first."""

from __future__ import annotations

import contextlib

import torch

from cuda_ops.testing.backward import backward, differentiable, stepped
from cuda_ops.testing.case import Case, NotRunError, called, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.poison import POISONS, poisoned


@check("temporaries", 15, "unwritten output or lifetime of temporaries", Draw(4, range(1, 4097)),
       quick=True)  # fmt: skip
def temporaries(case: Case) -> None:
    """Checks that strided arguments give the same whatever memory held before, and so do strided
    gradients. ``layouts`` would find these mistakes too, and give them the wrong name.
    """
    leaves = case.leaves() if case.subject.gradient == "declared" else case.arguments()
    case.call(*leaves)  # what is refused contiguous is no matter of strides
    args = tuple(stepped(v) if isinstance(v, torch.Tensor) else v for v in leaves)
    if (found := called(case, args)) is None:
        raise NotRunError("the operator refuses strided inputs")
    gradients = [stepped(torch.full_like(out, 0.5)) for out in differentiable(found)]
    runs: list[list[torch.Tensor]] = []
    for byte in POISONS:
        with poisoned(case.device, byte):  # what the operator allocates, and no argument
            results = list(case.call(*args))
            if outputs := differentiable(results):
                with contextlib.suppress(RuntimeError):  # which checks of gradients report
                    results += backward(outputs, args, gradients)
            runs.append([result.detach().clone() for result in results])
    what = "strided tensors give a result that changes with what was in memory before"
    case.same(runs[0], runs[1], what)
