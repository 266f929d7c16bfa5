"""Rotary position embeddings with their tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

import cuda_ops
from cuda_ops.derive.checks import dtypes_text
from cuda_ops.nn._like_torch import (
    has_values,
    is_int,
    must_be_bool,
    must_be_int,
    must_be_tensor,
    refuse,
    refuse_call,
)
from cuda_ops.ops._moe_checks import FLOATING

#: Angles are computed in float64, which tells positions apart up to here.
_MOST_POSITIONS = 2**53


class RotaryEmbedding(torch.nn.Module):
    """Turns queries or keys by the angles of their positions: :func:`cuda_ops.rotary_embedding`.

    It holds the cosines and sines of positions 0 to max_positions - 1, which are no part of the
    state dict, as in torchtune. ``half()`` and ``to(bfloat16)`` leave them in their dtype: rounded
    angles would mix up distant positions. After ``to_empty`` they are computed anew.

    State dict: empty.
    Shapes: x (..., S, heads, D), D at least dim; positions (..., S); the result has the shape of x.
    The elements behind dim are copied.
    Dtypes: x float64, float32, float16 or bfloat16, positions int64 or int32; the result has the
    dtype of x.

    Args:
        dim: how many elements of each head are turned, an even number.
        max_positions: for how many positions there are tables.
        base: the frequency of pair j is base^(-2 j / dim), times the position.
        interleaved: pairs are elements 2j and 2j + 1, as in GPT-J; otherwise j and j + dim / 2, as
            in GPT-NeoX and Llama.
        device, dtype: of the tables; float32 by default, or float64, float16 or bfloat16.

    Errors: ValueError for an odd dim, a base that is not a positive number, or any other argument
    of the constructor out of range; RuntimeError for an x with more positions than the tables have,
    for given positions that the tables do not have, on a CPU, and any other dtype or shape. What
    traces or transforms a call does not look at given positions: torch raises IndexError for one
    beyond the tables, and counts a negative one from their end. A GPU does not check them either:
    one that is out of range ends the process's work on the device, as any index does.
    Formula: Su et al., https://arxiv.org/abs/2104.09864.

    Example:
    >>> rotary = cuda_ops.nn.RotaryEmbedding(dim=2, max_positions=8)
    >>> x = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])  # two positions, one head
    >>> rotary(x)
    tensor([[[1.0000, 0.0000]],
    <BLANKLINE>
            [[0.5403, 0.8415]]])
    >>> rotary(x, positions=torch.tensor([3, 0]))
    tensor([[[-0.9900,  0.1411]],
    <BLANKLINE>
            [[ 1.0000,  0.0000]]])
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int = 4096,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        device: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not is_int(dim) or dim % 2 or dim < 2:
            refuse("RotaryEmbedding", "dim", "an even number from 2 on", dim)
        must_be_int("RotaryEmbedding", "max_positions", max_positions, 1, _MOST_POSITIONS)
        if not _is_positive(base):
            refuse("RotaryEmbedding", "base", "a positive number", base)
        must_be_bool("RotaryEmbedding", "interleaved", interleaved)
        if dtype not in FLOATING:
            refuse("RotaryEmbedding", "dtype", dtypes_text(FLOATING), dtype)
        self.dim, self.max_positions, self.base = dim, max_positions, base
        self.interleaved, self.dtype = interleaved, dtype
        for name in ("cos", "sin"):
            table = torch.empty(max_positions, dim // 2, device=device, dtype=dtype)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Computes the tables anew, where they are."""
        device = self.cos.device
        # In float64: angles are large, and a GPU has time for it once.
        pairs = torch.arange(0, self.dim, 2, device=device, dtype=torch.float64) / self.dim
        positions = torch.arange(self.max_positions, device=device, dtype=torch.float64)
        angles = torch.outer(positions, self.base**-pairs)
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryEmbedding:
        before = self.cos
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        # Tables that were rounded, or have come from the meta device without values.
        if self.cos.dtype is not before.dtype or (before.is_meta and not self.cos.is_meta):
            self.reset_parameters()
        return self

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x, each head turned by the angles of its position: 0, 1, ... by default."""
        must_be_tensor(self, "x", x)
        # Sizes that torch.compile or torch.jit records are the operator's to check.
        checked = not (torch.compiler.is_compiling() or torch._C._is_tracing())
        if checked:
            self._check_heads(x)
        if positions is None:
            length = x.shape[-3] if x.dim() > 2 else 0
            if length > self.max_positions:
                expected = f"at most {self.max_positions} positions, for which there are tables"
                refuse_call(self, "x", expected, f"{length}")
            cos, sin = self.cos[:length], self.sin[:length]
        else:
            must_be_tensor(self, "positions", positions)
            if positions.dtype not in (torch.int64, torch.int32):  # torch masks by bool and uint8
                refuse_call(self, "positions", "dtype int64 or int32", f"{positions.dtype}")
            if checked:
                self._check_positions(x, positions)
            cos, sin = self.cos[positions], self.sin[positions]
        out: torch.Tensor = cuda_ops.rotary_embedding(x, cos, sin, self.interleaved)
        return out

    def _check_heads(self, x: Any) -> None:
        """Refuses heads that are too small, where the operator would name a table."""
        if _has_shape(x) and x.shape[-1] < self.dim:
            expected = f"a last dim of at least {self.dim}, the elements that are turned"
            refuse_call(self, "x", expected, f"shape {list(x.shape)}")

    def _check_positions(self, x: Any, positions: torch.Tensor) -> None:
        """Refuses positions that do not fit x, where the operator would name a table, and those
        that torch would count from the end of the tables, or not find there.
        """
        if _has_shape(x):
            length, outer, given = x.shape[-3], x.shape[:-3], positions.shape
            pairs = zip(given[-2::-1], outer[::-1], strict=False)
            if not given or given[-1] != length or not all(a == b or 1 in (a, b) for a, b in pairs):
                expected = f"shape (..., {length}) that fits an x of shape {list(x.shape)}"
                refuse_call(self, "positions", expected, f"{list(given)}")
        if positions.numel() and has_values(positions):
            least, most = map(int, positions.aminmax())
            if least < 0 or most >= self.max_positions:
                wrong = least if least < 0 else most
                expected = f"0 to {self.max_positions - 1}"
                refuse_call(self, "positions", expected, f"{wrong}")

    def extra_repr(self) -> str:
        """Returns the arguments of the constructor."""
        return (
            f"{self.dim}, max_positions={self.max_positions}, base={self.base}, "
            f"interleaved={self.interleaved}"
        )


def _has_shape(x: Any) -> bool:
    """Tells whether x has a shape (..., S, heads, D); the operator refuses any other."""
    return isinstance(x, torch.Tensor) and not x.is_nested and x.dim() > 2


def _is_positive(given: Any) -> bool:
    return isinstance(given, Real) and 0 < float(given) < math.inf
