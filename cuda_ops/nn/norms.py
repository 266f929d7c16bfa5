"""Layer norm and RMS norm, alone and behind the addition of a residual."""

from __future__ import annotations

from typing import Any

import torch

import cuda_ops
from cuda_ops.derive.checks import dtype_name, dtypes_text
from cuda_ops.nn._like_torch import (
    must_be_bool,
    must_be_number,
    must_be_shape,
    must_be_tensor,
    refuse,
    refuse_call,
    widened,
)
from cuda_ops.ops._moe_checks import FLOATING


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` by :func:`cuda_ops.layer_norm`.

    Nothing is kept for the gradient beside the arguments. Where weight or bias is missing, ones or
    zeros are made in each call: the operator takes both.

    State dict: that of torch.nn.LayerNorm: weight and bias of normalized_shape.
    Shapes: input (..., normalized_shape); the result is contiguous. Where there are several dims
    to normalize, they are made one, which copies an input in which they do not lie together.
    Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of the input. Weight and
    bias have that too, or float32 where the input is a half. Under autocast on a GPU a half is
    taken to float32 first, as torch does.

    Args:
        normalized_shape: the size of the last dim, or of several.
        eps: added to the variance.
        elementwise_affine: False leaves out weight and bias.
        bias: False leaves out the bias.
        device, dtype: of the parameters.

    Errors: ValueError for a normalized_shape that is no size, or an eps that is no number of 0 or
    more; RuntimeError for any other dtype or shape.
    Formula: Ba, Kiros and Hinton, https://arxiv.org/abs/1607.06450.

    Example:
    >>> cuda_ops.nn.LayerNorm(2)(torch.tensor([[1.0, 3.0]])).detach()
    tensor([[-1.0000,  1.0000]])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        must_be_shape("LayerNorm", "normalized_shape", normalized_shape)
        must_be_number("LayerNorm", "eps", eps)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        must_be_tensor(self, "input", input)
        rows = _rows(self, "input", widened(input, "layer_norm"))
        weight = _weight(self.weight, rows, "layer_norm")
        given: torch.Tensor | None = self.bias  # which torch types as if it were always there
        bias = torch.zeros_like(weight) if given is None else widened(given.flatten(), "layer_norm")
        out: torch.Tensor = cuda_ops.layer_norm(rows, weight, bias, self.eps)
        return out.view(input.shape)


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` by :func:`cuda_ops.rms_norm`.

    Nothing is kept for the gradient beside the arguments. Where the weight is missing, ones are
    made in each call: the operator takes one.

    State dict: that of torch.nn.RMSNorm: weight of normalized_shape.
    Shapes: x (..., normalized_shape); the result is contiguous. Where there are several dims to
    normalize, they are made one, which copies an x in which they do not lie together.
    Dtypes: float64, float32, float16 or bfloat16; the result has the dtype of x. The weight has
    that too, or float32 where x is a half. Under autocast on a GPU a half is taken to float32
    first where torch does so: 2.13 does, 2.11 does not.

    Args:
        normalized_shape: the size of the last dim, or of several.
        eps: added to the mean square; None is the machine epsilon of float64 for float64 and of
            float32 for the others.
        elementwise_affine: False leaves out the weight.
        device, dtype: of the weight.

    Errors: ValueError for a normalized_shape that is no size, or an eps that is no number of 0 or
    more; RuntimeError for any other dtype or shape.
    Formula: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.

    Example:
    >>> cuda_ops.nn.RMSNorm(2, elementwise_affine=False)(torch.tensor([[3.0, 4.0]]))
    tensor([[0.8485, 1.1314]])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_rms("RMSNorm", normalized_shape, eps)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x over the root of its mean square, times the weight."""
        must_be_tensor(self, "x", x)
        return _rms_norm(self, widened(x, "rms_norm")).view(x.shape)


class AddRMSNorm(torch.nn.RMSNorm):
    """Adds x to a residual and normalizes the sum, as the fused norms of serving engines do.

    It returns both: the norm for the next layer, and the sum, the residual for the norm after that.

    State dict: that of torch.nn.RMSNorm: weight of normalized_shape.
    Shapes: x and residual (..., N) of the same shape; both results too.
    Dtypes: float64, float32, float16 or bfloat16, the same for x and residual and for both results.
    The weight has that too, or float32 where x is a half.

    Args:
        normalized_shape: the size N of the last dim.
        eps: as for RMSNorm.
        elementwise_affine: as for RMSNorm.
        device, dtype: of the weight.
        inplace: write the results over x and residual in one pass, by
            :func:`cuda_ops.add_rms_norm_`. It has no gradient: call it under torch.no_grad() or
            inference_mode.

    Errors: ValueError for a normalized_shape that is no size or of several dims, an eps that is no
    number of 0 or more, or an inplace that is no bool; RuntimeError for any other dtype or shape,
    and with inplace where a gradient is wanted.
    Formula: residual += x; x = rms_norm(residual), as fused_add_rms_norm of vLLM.

    Example:
    >>> norm = cuda_ops.nn.AddRMSNorm(2, elementwise_affine=False)
    >>> norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]]))
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        inplace: bool = False,
    ) -> None:
        _check_rms("AddRMSNorm", normalized_shape, eps)
        must_be_bool("AddRMSNorm", "inplace", inplace)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if len(self.normalized_shape) != 1:
            refuse("AddRMSNorm", "normalized_shape", "one dim", self.normalized_shape)
        self.inplace = inplace

    def forward(  # type: ignore[override]  # two tensors in and out
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + residual, and x + residual."""
        must_be_tensor(self, "x", x)
        must_be_tensor(self, "residual", residual)
        if self.inplace:
            weight = _weight(self.weight, x, "rms_norm")
            cuda_ops.add_rms_norm_(x, residual, weight, _eps(self, x))
            return x, residual
        self._check(x, residual)
        total = cuda_ops.add(x, residual)
        return _rms_norm(self, total), total

    def _check(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Refuses what add would name as its own arguments, or broadcast."""
        if x.is_nested or residual.is_nested:  # without a shape to compare; add refuses both
            return
        if x.shape != residual.shape:
            expected = f"the shape of 'x', {list(x.shape)}"
            refuse_call(self, "residual", expected, f"{list(residual.shape)}")
        if x.dtype not in FLOATING:
            refuse_call(self, "x", f"dtype {dtypes_text(FLOATING)}", dtype_name(x.dtype))
        # Autocast makes both the same.
        if residual.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            expected = f"dtype {dtype_name(x.dtype)} like 'x'"
            refuse_call(self, "residual", expected, dtype_name(residual.dtype))
        if residual.device != x.device:
            expected = f"a tensor on {x.device} like 'x'"
            refuse_call(self, "residual", expected, f"one on {residual.device}")

    def extra_repr(self) -> str:
        """Returns what torch.nn.RMSNorm shows, and whether the results are written in place."""
        return f"{super().extra_repr()}, inplace={self.inplace}"


def _check_rms(module: str, normalized_shape: Any, eps: Any) -> None:
    must_be_shape(module, "normalized_shape", normalized_shape)
    if eps is not None:
        must_be_number(module, "eps", eps)


def _rms_norm(norm: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    rows = _rows(norm, "x", x)
    weight = _weight(norm.weight, rows, "rms_norm")
    out: torch.Tensor = cuda_ops.rms_norm(rows, weight, _eps(norm, x))
    return out


def _eps(norm: torch.nn.RMSNorm, x: torch.Tensor) -> float:
    if norm.eps is not None:
        return norm.eps
    # That of the dtype in which sums run.
    return torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps


def _rows(
    norm: torch.nn.LayerNorm | torch.nn.RMSNorm, argument: str, x: torch.Tensor
) -> torch.Tensor:
    """Returns x with one dim in place of those that are normalized."""
    shape = norm.normalized_shape
    if len(shape) == 1:
        return x
    if x.shape[-len(shape) :] != shape:
        expected = f"a tensor whose last dims are {list(shape)}, the normalized_shape"
        refuse_call(norm, argument, expected, f"shape {list(x.shape)}")
    return x.flatten(-len(shape))


def _weight(weight: torch.Tensor | None, rows: torch.Tensor, op: str) -> torch.Tensor:
    return rows.new_ones(rows.shape[-1:]) if weight is None else widened(weight.flatten(), op)
