"""Makes a step of training one function, for cases that time forward and backward together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from cuda_ops.testing.compare import outputs
from cuda_ops.testing.tolerance import is_floating


def with_gradients(
    function: Callable[..., Any],
    between: Callable[[tuple[Any, ...]], None] = lambda results: None,
    fixed: Collection[int] = (),
    like: Sequence[torch.dtype] = (),
    constants: Collection[int] = (),
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a function of the same arguments that also computes the floating ones' gradients.

    It returns the results of ``function``, then the gradients. The loss is half the sum of the
    squared results, so its gradient, which is the results, costs nothing. ``between`` is called
    with the results before backward starts. The arguments at the positions ``fixed`` have none, and
    the results at the positions ``constants`` are no part of the loss.
    A reference in a wider dtype rounds its results to the dtypes ``like`` before they are incoming
    gradients, since those of the function that it is compared with are rounded too.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        wanted = [i for i, a in enumerate(args) if is_floating(a) and i not in fixed]
        leaves = [a.detach().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
        with torch.enable_grad():
            results = outputs(function(*leaves, **kwargs))
        ends = [i for i, out in enumerate(results) if out.requires_grad and i not in constants]
        if not ends:
            raise RuntimeError("no result has a gradient")
        between(results)
        detached = tuple(result.detach() for result in results)
        incoming = list(detached)
        for i, dtype in zip(range(len(results)), like, strict=False):  # some may be hidden
            incoming[i] = detached[i].to(dtype).to(detached[i].dtype)
        gradients = torch.autograd.grad(
            [results[i] for i in ends],
            [leaves[i] for i in wanted],
            [incoming[i] for i in ends],
            materialize_grads=True,
        )
        return (*detached, *gradients)

    return step
