"""What ``bitonic_sort`` and ``bitonic_topk`` have in common, beside :mod:`cuda_ops.ops._along_dim`.

Their results are values and indices whose elements along the dim are neighbors in memory, as
``sort_binding.h`` lays them out, and the gradient goes to the elements that the values came from.
"""

from __future__ import annotations

from typing import Any

import torch

from cuda_ops.spec import Autograd


def empty(x: torch.Tensor, dim: int, length: Any, dtype: torch.dtype) -> torch.Tensor:
    """Makes a result for ``x``: ``length`` neighbors along ``dim``, the other dims row-major."""
    if not x.dim():
        return x.new_empty((), dtype=dtype)
    others = [size for d, size in enumerate(x.shape) if d != dim]
    return x.new_empty((*others, length), dtype=dtype).movedim(-1, dim)


def autograd(dim_at: int) -> Autograd:
    """Sends each value's gradient to the element that it came from; no index occurs twice.

    Args:
        dim_at: the position of the operator's argument ``dim``.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.shape = inputs[0].shape
        ctx.dim = int(inputs[dim_at])  # torch.ops takes True for 1, which scatter refuses
        ctx.arguments = len(inputs)
        ctx.save_for_backward(output[1])
        ctx.set_materialize_grads(True)

    def backward(ctx: Any, grad_values: torch.Tensor, _: Any) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        grad_x = grad_values.new_zeros(ctx.shape).scatter(ctx.dim, indices, grad_values)
        return (grad_x, *[None] * (ctx.arguments - 1))

    return Autograd(setup_context, backward)
