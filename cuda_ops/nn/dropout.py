"""Dropout that keeps no mask."""

from __future__ import annotations

import torch

import cuda_ops
from cuda_ops.nn._like_torch import must_be_number, refuse_in_place


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` by :func:`cuda_ops.dropout`, which keeps two numbers and no mask.

    The gradient draws the same random numbers again. They come from the generator of the device, so
    ``torch.manual_seed`` repeats them, but they are others than torch's module draws.

    State dict: empty.
    Shapes: input (...); the result has its shape.
    Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of the input.

    Args:
        p: the probability that an element is 0, from 0 to 1.
        inplace: False.

    Errors: ValueError for inplace=True or a p that is not from 0 to 1; RuntimeError for any other
    dtype.
    Formula: Srivastava et al., https://jmlr.org/papers/v15/srivastava14a.html.

    Example:
    >>> cuda_ops.nn.Dropout(0.5).eval()(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        refuse_in_place("Dropout", inplace)
        must_be_number("Dropout", "p", p, 1)
        super().__init__(p)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.dropout(input, self.p, self.training)
        return out
