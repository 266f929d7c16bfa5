"""One table of tolerances, for each dtype and reduction length, and the errors in units of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cuda_ops.testing.arguments import spread

#: Two numbers in a byte. torch copies them and compares their bytes, and computes nothing.
PAIRS = torch.float4_e2m1fn_x2
_PAIR_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
#: The error that one result may have, in units of the dtype's epsilon. Half precision is rounded
#: once from float32; wider dtypes are computed in their own precision, with a device's own exp.
#: Results of the coarsest ones may be one number off.
EPSILONS = {
    torch.float64: 32.0, torch.float32: 32.0, torch.float16: 4.0, torch.bfloat16: 4.0,
    torch.float8_e8m0fnu: 1.0, PAIRS: 1.0,
}  # fmt: skip
#: The dtype that sums of half precision are taken in, unless an operator claims to round in
#: between. Their errors grow with the square root of the number of terms.
SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
#: For every other floating dtype, float8_e4m3fn and float8_e5m2 among them.
_OTHER_EPSILONS = 2.0
#: Dtypes to which what is too large becomes NaN in some versions of torch, and the largest number
#: in others; both count as right.
_WITHOUT_INFINITY = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
#: How many times smaller than the largest number a result may be that overflows on the way.
_NEARLY = 256


class Deviation(float):
    """The largest error in units of the tolerance; more than 1 is wrong."""

    #: Where it is, and the values there: ``": at [0, 3] got 0, expected -128"``.
    place: str = ""

    @property
    def text(self) -> str:
        return f"the error is {self:.3g} times the tolerance{self.place}"


class Doubt(NamedTuple):
    """What one of the reference's results leaves open, by number: how far off it may be, and
    whether an infinity or NaN may be another.
    """

    by: torch.Tensor
    ends: torch.Tensor


def tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors among arguments or outputs."""
    return [value for value in spread(values) if isinstance(value, torch.Tensor)]


def is_floating(value: Any) -> bool:
    """Tells whether a value is a tensor of floating numbers, other than packed ones."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != PAIRS


def is_inexact(value: Any) -> bool:
    """Tells whether a value is a tensor of floating or complex numbers."""
    return is_floating(value) or (isinstance(value, torch.Tensor) and value.is_complex())


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which references compute: float64, or complex128."""
    return torch.complex128 if dtype.is_complex else torch.float64


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's numbers in float64 or complex128; pairs get one more dim."""
    if tensor.dtype != PAIRS:
        return tensor.to(wide_dtype(tensor.dtype))
    codes = tensor.contiguous().view(torch.uint8)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).to(torch.int64)
    values = _PAIR_VALUES[nibbles & 7]
    return torch.where(nibbles > 7, -values, values)


def size_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sizes of the numbers of a floating or complex tensor, in its dtype."""
    if tensor.dtype == torch.float8_e8m0fnu:  # positive, and torch has no abs for it
        return tensor
    return tensor.abs().to(tensor.dtype)


def largest(values: Sequence[Any]) -> float:
    """Returns the largest finite magnitude among floating tensors; 0 if there is none."""
    sizes = [v.detach().to(wide_dtype(v.dtype)).abs() for v in values if is_inexact(v)]
    finite = [size[size.isfinite()] for size in sizes]
    return max((v.max().item() for v in finite if v.numel()), default=0.0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether tensors are equal to the bit: NaN equals itself, and -0.0 is not 0.0."""

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)

    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    return alike and (not a.numel() or torch.equal(as_bytes(a), as_bytes(b)))


def epsilon(dtype: torch.dtype) -> float:
    """Returns the relative error that one result of this dtype may have."""
    dtype = dtype.to_real()
    eps = 0.5 if dtype == PAIRS else torch.finfo(dtype).eps
    return EPSILONS.get(dtype, _OTHER_EPSILONS) * eps


def errors(
    actual: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    magnitude: float,
    length: int = 1,
    *,
    factor: float = 1.0,
    least: float = 0.0,
    doubts: Sequence[Doubt] | None = None,
    rounded: bool = True,
) -> Deviation:
    """Returns the largest error in units of ``factor`` times the table's tolerance, to which the
    ``doubts`` of each number are added. Where ends are open, any number that is not finite equals
    any other.

    The tolerance is relative to the result and, for sums of ``length`` numbers, also to the size
    ``magnitude`` of what was added up. No epsilon of the table counts as less than ``least``. Both
    parts of a complex number may be wrong by what its size allows.

    Raises:
        AssertionError: the number of results or a shape differs, or a result that is not floating.
    """
    worst = Deviation(0)
    assert len(actual) == len(expected), f"{len(actual)} results, expected {len(expected)}"
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        name = f"result {i} " if len(actual) > 1 else ""
        assert a.shape == e.shape, f"shape {list(a.shape)}, expected {list(e.shape)}"
        a, e = a.detach().cpu(), e.detach().cpu()
        dtype = a.dtype
        if dtype == PAIRS:
            assert e.dtype == PAIRS, f"{name}{dtype}, expected {e.dtype}"
            a, e = numbers(a), numbers(e)
        if not is_inexact(a):
            # Both ways: 0 is not 0.5, and 2**60 + 1 not 2.0**60.
            differs = (a.to(e.dtype) != e) | (a != e.to(a.dtype))
            assert not differs.any(), f"the result differs: {name}{_place(differs, a, e)}"
            continue
        assert a.is_complex() or not e.is_complex(), f"{name}{a.dtype}, expected {e.dtype}"
        tiny, most = torch.finfo(a.dtype).tiny, torch.finfo(a.dtype).max
        unit = max(epsilon(dtype), least)
        summed = max(epsilon(SUMMED_IN.get(a.dtype, a.dtype)), least) if length > 1 else unit
        beyond = None
        if dtype in _WITHOUT_INFINITY:
            beyond = numbers(e).abs() > torch.finfo(dtype).max
        # What overflows the dtype is infinite in the reference too, but where the tolerance leaves
        # open whether it does: summands that cancel may be far larger than their sum.
        near, exact = (v.to(wide_dtype(a.dtype)) for v in (e.to(a.dtype), e))
        reach = factor * (unit * exact.abs() + summed * math.sqrt(length) * magnitude)
        within = exact.isfinite() & (exact.abs() - reach <= most)
        e = torch.where(within, exact, near)
        e = torch.where(near.isfinite(), near if rounded else exact, e)
        allowed = factor * (unit * e.abs() + summed * math.sqrt(length) * magnitude)
        a = a.to(wide_dtype(a.dtype))
        if a.is_complex():
            a, e, near = (torch.view_as_real(value) for value in (a, e, near))
            allowed = allowed.unsqueeze(-1)
        same = (a == e) | (near.isinf() & (a == near)) | (a.isnan() & e.isnan())
        if beyond is not None:
            same |= beyond & (a.isnan() | (a.abs() == torch.finfo(dtype).max))
        if doubts is not None:
            by, ends = doubts[i]
            if allowed.dim() > by.dim():
                by, ends = by.unsqueeze(-1), ends.unsqueeze(-1)
            # What nearly overflows may do so on the way, and so may sizes that add up to as much.
            over = ~e.isfinite() | (e.abs() > most / _NEARLY) | (magnitude > most)
            same |= ends & ~a.isfinite() & over
            allowed = allowed + torch.where(by.isfinite(), by, 0.0)
        # Each number that is added up may have been taken for 0, as atomic additions do.
        flushed = tiny + (length - 1) * min(tiny, torch.finfo(torch.float32).tiny)
        error = torch.where(same, 0.0, (a - e).abs() / (allowed + flushed))
        error = torch.where(same | (a.isfinite() & e.isfinite()), error, math.inf)
        if error.numel() and error.max() > worst:
            worst = Deviation(error.max())
            worst.place = f": {name}{_place(error, a, e)}"
    return worst


def _place(error: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Says where the largest error is, the first of several equal ones."""
    at = tuple(int(i) for i in torch.unravel_index(error.to(torch.float64).argmax(), error.shape))
    got, wanted = (value[at].item() for value in (actual, expected))
    return f"at {list(at)} got {got:.6g}, expected {wanted:.6g}"


def same(
    actual: Sequence[Any],
    expected: Sequence[Any],
    what: str,
    *,
    factor: float = 1.0,
    least: float = 0.0,
) -> None:
    """Compares two runs of the same arithmetic, perhaps in another order; ``factor`` and ``least``
    are those of :func:`errors`.

    Raises:
        AssertionError: they differ by more than the table allows; the text starts with ``what``.
    """
    worst = errors(actual, expected, largest(expected), factor=factor, least=least)
    assert worst <= 1, f"{what}: {worst.text}"
