"""Elementwise activations, and the gated one of SwiGLU layers."""

from __future__ import annotations

import torch

import cuda_ops
from cuda_ops.nn._like_torch import refuse, refuse_in_place


class SiLU(torch.nn.SiLU):
    """``torch.nn.SiLU`` by :func:`cuda_ops.silu`: x * sigmoid(x).

    State dict: empty.
    Shapes: input (...); the result has its shape.
    Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of the input.

    Args:
        inplace: False.

    Errors: ValueError for inplace=True; RuntimeError for any other dtype.
    Formula: Elfwing, Uchibe and Doya, https://arxiv.org/abs/1702.03118.

    Example:
    >>> cuda_ops.nn.SiLU()(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([-0.2689,  0.0000,  1.7616])
    """

    def __init__(self, inplace: bool = False) -> None:
        refuse_in_place("SiLU", inplace)
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.silu(input)
        return out


class ReLU(torch.nn.ReLU):
    """``torch.nn.ReLU`` by :func:`cuda_ops.relu`: max(x, 0).

    State dict: empty.
    Shapes: input (...); the result has its shape.
    Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of the input.

    Args:
        inplace: False.

    Errors: ValueError for inplace=True; RuntimeError for any other dtype.
    Formula: max(x, 0); NaN stays NaN.

    Example:
    >>> cuda_ops.nn.ReLU()(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0., 0., 2.])
    """

    def __init__(self, inplace: bool = False) -> None:
        refuse_in_place("ReLU", inplace)
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.relu(input)
        return out


class GELU(torch.nn.GELU):
    """``torch.nn.GELU(approximate="tanh")`` by :func:`cuda_ops.gelu_approx`.

    There is no kernel for the exact function, which is another one: torch's ``GELU()`` is exact,
    and the two differ by up to 0.0005.

    State dict: empty.
    Shapes: input (...); the result has its shape.
    Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of the input.

    Args:
        approximate: "tanh", which is the default here.

    Errors: ValueError for approximate="none"; RuntimeError for any other dtype.
    Formula: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), Hendrycks and Gimpel,
    https://arxiv.org/abs/1606.08415.

    Example:
    >>> cuda_ops.nn.GELU()(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([-0.1588,  0.0000,  1.9546])
    """

    def __init__(self, approximate: str = "tanh") -> None:
        if approximate != "tanh":
            expected = "'tanh', the approximation that cuda_ops.gelu_approx computes"
            refuse("GELU", "approximate", expected, approximate)
        super().__init__(approximate)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.gelu_approx(input)
        return out


class SiluAndMul(torch.nn.Module):
    """The gated linear unit of a SwiGLU layer by :func:`cuda_ops.silu_and_mul`: silu(gate) * up.

    It comes after one projection that computes both, such as vLLM's ``gate_up_proj``.

    State dict: empty.
    Shapes: x (..., 2 D), the gate first; the result (..., D).
    Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x.
    Errors: RuntimeError for any other dtype, or an odd last dim.
    Formula: Shazeer, https://arxiv.org/abs/2002.05202.

    Example:
    >>> cuda_ops.nn.SiluAndMul()(torch.tensor([1.0, 2.0, 10.0, 100.0]))
    tensor([  7.3106, 176.1594])
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns silu of the first half of the last dim, times the second half."""
        out: torch.Tensor = cuda_ops.silu_and_mul(x)
        return out
