"""A linear layer and its gelu in one pass."""

from __future__ import annotations

from typing import Any

import torch

import cuda_ops
from cuda_ops.nn._like_torch import must_be_bool, must_be_int


class FusedLinearGELU(torch.nn.Linear):
    """``torch.nn.Linear`` followed by ``GELU(approximate="tanh")``, in one pass over memory.

    The operator is :func:`cuda_ops.fused_linear_gelu`; weight and bias are a Linear's.

    State dict: that of torch.nn.Linear: weight (O, I) and bias (O).
    Shapes: input (..., I); the result (..., O).
    Dtypes: float64, float32, float16 or bfloat16, the same for input, weight and bias; under
    autocast its dtype, as for a Linear.

    Args:
        in_features: I.
        out_features: O.
        bias: False leaves the bias out.
        device, dtype: of the parameters.
        save_preactivation: keep what goes into gelu for the gradient, as much memory as the result;
            otherwise the gradient multiplies once more.

    Errors: ValueError for a size that is no int, or a save_preactivation that is no bool;
    RuntimeError for any other dtype, mixed dtypes or devices, or another size than I.
    Formula: gelu(x @ weight^T + bias) in its tanh approximation, Hendrycks and Gimpel,
    https://arxiv.org/abs/1606.08415.

    Example:
    >>> layer = cuda_ops.nn.FusedLinearGELU(2, 3)
    >>> theirs = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU("tanh"))
    >>> theirs[0].load_state_dict(layer.state_dict())
    <All keys matched successfully>
    >>> x = torch.ones(1, 2)
    >>> torch.allclose(layer(x), theirs(x))
    True
    """

    #: Also for modules that were made of a Linear.
    save_preactivation: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        save_preactivation: bool = False,
    ) -> None:
        must_be_int("FusedLinearGELU", "in_features", in_features, 0)
        must_be_int("FusedLinearGELU", "out_features", out_features, 0)
        must_be_bool("FusedLinearGELU", "save_preactivation", save_preactivation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.save_preactivation = save_preactivation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.fused_linear_gelu(
            input, self.weight, self.bias, save_preactivation=self.save_preactivation
        )
        return out

    def extra_repr(self) -> str:
        """Returns what torch.nn.Linear shows, and whether the preactivation is kept."""
        return f"{super().extra_repr()}, save_preactivation={self.save_preactivation}"
