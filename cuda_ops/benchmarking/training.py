"""Makes a step of training one function, for cases that time forward and backward together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.testing.compare import is_floating, outputs


def with_gradients(
    function: Callable[..., Any],
    between: Callable[[tuple[Any, ...]], None] = lambda results: None,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a function of the same arguments that also computes the floating ones' gradients.

    It returns the results of ``function``, then the gradients. The loss is half the sum of the
    squared results, so its gradient, which is the results, costs nothing. ``between`` is called
    with the results before backward starts.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        leaves = [a.detach().requires_grad_() if is_floating(a) else a for a in args]
        with torch.enable_grad():
            results = outputs(function(*leaves, **kwargs))
        ends = [result for result in results if result.requires_grad]
        if not ends:
            raise RuntimeError("no result has a gradient")
        between(results)
        detached = tuple(result.detach() for result in results)
        gradients = torch.autograd.grad(
            ends,
            [leaf for leaf in leaves if is_floating(leaf)],
            [end.detach() for end in ends],
            materialize_grads=True,
        )
        return (*detached, *gradients)

    return step
