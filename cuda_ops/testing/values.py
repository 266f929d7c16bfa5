"""The numbers in a sample's tensors, made from its seed by torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from cuda_ops.testing.samples import TensorArg

Values = Literal[
    "normal", "large", "tiny", "special", "equal",
    "largest", "smallest", "infinite", "negative_infinite", "all_infinite",
    "all_negative_infinite", "cancelling", "whole", "zeros", "far_mean", "wide",
]  # fmt: skip
#: What is drawn for all arguments of a sample. The other values are for single arguments: two
#: numbers next to the largest one add up to infinity in any order but one.
VALUES: tuple[Values, ...] = ("normal", "large", "tiny", "special", "equal")

#: Numbers that torch makes none of: their bytes, from the smallest to the largest, for values that
#: differ from ordinary ones. A float8_e8m0fnu is 2 to the power of its byte less 127.
CODES: dict[torch.dtype, dict[Values, tuple[int, int]]] = {
    torch.float8_e8m0fnu: {
        "normal": (120, 134), "large": (155, 163), "tiny": (0, 3), "special": (252, 255),
    },
    torch.float4_e2m1fn_x2: {"normal": (0, 255)},
}  # fmt: skip


def make_tensor(
    arg: TensorArg, values: Values, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Returns a tensor in its layout."""
    if arg.distinct and arg.below is not None:
        made = make_tensor(replace(arg, distinct=False), values, generator, device)
        order = torch.randperm(arg.below, generator=generator)[: made.numel()]
        return made.copy_(order.view(made.shape))

    def fill(*shape: int) -> torch.Tensor:
        if arg.below is not None:
            most = min(max(1, arg.below), torch.iinfo(arg.dtype).max)
            return torch.randint(0, most, shape, generator=generator).to(arg.dtype).to(device)
        return _fill(shape, arg.dtype, values, generator).to(device)

    shape, layout = arg.shape, arg.layout
    if layout == "transposed" and len(shape) > 1:
        return fill(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "sliced" and shape:
        return fill(*shape[:-1], shape[-1] + 3).narrow(-1, 1, shape[-1])
    if layout == "padded" and shape:  # the first row is aligned, and those after it are not
        return fill(*shape[:-1], shape[-1] + 1).narrow(-1, 0, shape[-1])
    if layout == "stepped" and shape:
        return fill(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "expanded" and shape:
        return fill(1, *shape[1:]).expand(shape)
    if layout == "unfolded" and len(shape) > 1:  # windows that slide by 1
        whole = fill(*shape[:-2], shape[-2] + shape[-1])
        return whole.as_strided(shape, (*whole.stride()[:-1], 1, 1))
    if layout == "framed" and len(shape) > 2:  # frames of rows that slide by a row
        whole = fill(*shape[:-3], shape[-3] + shape[-2], shape[-1])
        return whole.as_strided(shape, (*whole.stride()[:-1], whole.stride(-2), 1))
    if layout == "channels_last" and len(shape) == 4:
        return fill(*shape).contiguous(memory_format=torch.channels_last)
    if layout == "offset":
        return fill(math.prod(shape) + 3)[3:].view(shape)
    return fill(*shape)


def _fill(
    shape: tuple[int, ...], dtype: torch.dtype, values: Values, generator: torch.Generator
) -> torch.Tensor:
    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    if values == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if dtype == torch.bool:
        return integers(0, 1).to(dtype)
    if dtype in CODES:
        low, high = CODES[dtype].get(values, CODES[dtype]["normal"])
        codes = integers(low, high).to(torch.uint8)
        if values == "equal":
            one = torch.randint(low, high + 1, (), generator=generator)
            codes = codes.fill_(int(one))
        return codes.view(dtype)
    if values == "equal":
        one = _fill((), dtype, "normal", generator)
        return one.expand(shape).clone()
    if dtype.is_complex:
        real, imaginary = (_fill(shape, dtype.to_real(), values, generator) for _ in range(2))
        return torch.complex(real, imaginary)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        most = min(limits.max, 2**63 - 1)  # torch draws no larger ones
        if values == "large":
            return integers(most // 2, most - 1).to(dtype)
        if values == "tiny":
            return integers(0, 1).to(dtype)
        if values == "wide":
            return integers(max(limits.min, -1000), min(most, 1000)).to(dtype)
        if values == "special":
            edges = torch.tensor([limits.min, most, 0, 1])
            return edges[integers(0, 3)].to(dtype)
        if values in ("largest", "smallest"):
            end = most - 3 if values == "largest" else limits.min
            return (integers(0, 3) + end).to(dtype)
        return integers(max(limits.min, -10), 10).to(dtype)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    if values == "large":
        # Far beyond the range of exp, yet products of two still add up.
        normal *= info.max**0.25
    if values == "tiny":
        # Normal and denormal numbers mixed.
        normal *= info.tiny
    if values == "far_mean":  # of which a variance is lost in the mean of squares
        normal += 1000
    if values == "wide":  # sizes from 0.01 to 1000: on either side of where a formula changes
        # In float16 to 32, as with large ones: products of two still add up.
        lower, upper = -2.0, math.log10(min(1000.0, 2 * info.max**0.25))
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        normal = normal.sign() * 10 ** (lower + (upper - lower) * drawn)
    if values == "whole":  # many zeros, of either sign, and equal numbers
        normal = (1.5 * normal).round()
    if values == "special":
        edges = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0], dtype=torch.float64)
        normal = torch.where(integers(0, 3) == 0, edges[integers(0, 4)], normal)
    if values == "largest":
        # Less by what a claim of some noise may add.
        normal = normal.sign() * (1 - integers(1, 4) / 64) * info.max
    if values == "smallest":
        normal = normal.sign() * integers(1, 4) * info.smallest_normal * info.eps
    if values in ("infinite", "negative_infinite"):
        # NaN and the other infinity would hide what becomes of one.
        infinity = math.inf if values == "infinite" else -math.inf
        normal = torch.where(integers(0, 7) == 0, infinity, normal)
    if values in ("all_infinite", "all_negative_infinite"):  # as rows are that a mask hides whole
        normal.fill_(math.inf if values == "all_infinite" else -math.inf)
    if values == "cancelling" and shape:
        half = shape[-1] // 2
        normal[..., half : 2 * half] = -normal[..., :half]
    made = normal.to(dtype)
    if values == "special" and dtype in _BITS:
        # A GPU makes the NaN whose bits are all ones but for the sign, torch.nan is another one.
        bits = made.view(_BITS[dtype])
        bits[made.isnan() & (integers(0, 1) == 1)] = torch.iinfo(bits.dtype).max
    return made


#: Integers as wide as a floating dtype, whose largest is a NaN there.
_BITS = {
    torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32,
    torch.float64: torch.int64,
}  # fmt: skip
