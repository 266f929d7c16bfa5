"""Makes a step of training one function, for cases that time forward and backward together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from cuda_ops.testing.compare import is_floating, outputs


def with_gradients(
    function: Callable[..., Any],
    between: Callable[[tuple[Any, ...]], None] = lambda results: None,
    fixed: Collection[int] = (),
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a function of the same arguments that also computes the floating ones' gradients.

    It returns the results of ``function``, then the gradients. The loss is half the sum of the
    squared results, so its gradient, which is the results, costs nothing. ``between`` is called
    with the results before backward starts. The arguments at the positions ``fixed`` have none.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        wanted = [i for i, a in enumerate(args) if is_floating(a) and i not in fixed]
        leaves = [a.detach().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
        with torch.enable_grad():
            results = outputs(function(*leaves, **kwargs))
        ends = [result for result in results if result.requires_grad]
        if not ends:
            raise RuntimeError("no result has a gradient")
        between(results)
        detached = tuple(result.detach() for result in results)
        gradients = torch.autograd.grad(
            ends,
            [leaves[i] for i in wanted],
            [end.detach() for end in ends],
            materialize_grads=True,
        )
        return (*detached, *gradients)

    return step
