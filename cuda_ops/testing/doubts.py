"""What the results of a reference leave open: roundings that grow, and which end it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.arguments import each, sampled_arguments
from cuda_ops.testing.tolerance import (
    SUMMED_IN,
    Doubt,
    epsilon,
    is_inexact,
    largest,
    numbers,
    tensors,
)

#: How many times the change by one rounding of each argument counts.
_ROUNDINGS = 8
#: The largest factor by which a rounding may have been multiplied.
_MOST_MULTIPLIED = 1000.0
#: How many core places of infinities are looked at.
_MOST_PLACES = 64
#: What rounding in float64 leaves of numbers that cancel, relative to them.
NOTHING = 1e-12
_Reference = Callable[[list[Any]], Sequence[Any]]


def doubts_of(
    op: OpSpec,
    reference: _Reference,
    wide: list[Any],
    actual: Sequence[Any],
    expected: Sequence[Any],
    ends_alike: bool,
) -> list[Doubt]:
    """Returns what each of the reference's results leaves open, as far as three more runs of it
    tell: with arguments that are one rounding away, one half of them and then the other, for
    results as wide as its own; and with a number for each infinity, since what rounds to 0 makes
    NaN of an infinity, and what nearly does makes an infinity, as do :func:`_zero_factors`. With
    ``ends_alike`` all ends are open. What was rounded before may be multiplied by a number beside
    the tensors.
    """
    tamed = [each(lambda v: _tamed(v) if is_inexact(v) else v, value) for value in wide]
    of_tamed = reference(tamed)
    size = largest(of_tamed)
    named = zip(sampled_arguments(op), wide, strict=False)
    factors = [abs(value) for one, value in named if str(one.real_type) == "float"]
    multiplied = size * min(_MOST_MULTIPLIED, max(filter(math.isfinite, factors), default=0.0))
    found = []
    moved = [
        reference([each(partial(_one_rounding_away, first), v) for v in wide]) for first in (0, 1)
    ]
    open_ends = [torch.tensor(ends_alike)] * len(expected)
    zeros = open_ends if ends_alike else _zero_factors(op, reference, wide) or open_ends
    near_all = zip(*moved, strict=True)
    for a, e, near, one, zero in zip(actual, expected, near_all, of_tamed, zeros, strict=True):
        by = torch.zeros(e.shape, dtype=torch.float64)
        ends = torch.zeros(e.shape, dtype=torch.bool) | zero
        if is_inexact(e) and is_inexact(a):
            if a.dtype == e.dtype:
                changes = [(numbers(n) - numbers(e)).abs().nan_to_num(0.0, 0.0) for n in near]
                by = _ROUNDINGS * torch.maximum(*changes)
            if a.itemsize >= 4:  # narrower ones are rounded once, at the end
                by += multiplied * epsilon(a.dtype)
            ends |= numbers(one).abs() <= epsilon(a.dtype) * size
        found.append(Doubt(by, ends))
    return found


def multiplied_by_arguments(
    doubts: list[Doubt], wide: list[Any], actual: Sequence[Any]
) -> list[Doubt]:
    """Adds what the arguments at each place may have multiplied a rounding inside of a formula by:
    of ``gate * (1 + tanh(x))`` a gate of a thousand makes a thousand epsilons.
    """
    sizes = [numbers(value).abs().clamp(min=1) for value in tensors(wide) if is_inexact(value)]
    most = math.prod(torch.broadcast_tensors(*sizes), start=torch.tensor(1.0)).nan_to_num(0.0, 0.0)
    found = []
    for doubt, a in zip(doubts, actual, strict=True):
        if is_inexact(a) and most.shape == doubt.by.shape:
            dtype = SUMMED_IN.get(a.dtype, a.dtype)
            doubt = doubt._replace(by=doubt.by + most * epsilon(dtype))
        found.append(doubt)
    return found


def _zero_factors(op: OpSpec, reference: _Reference, wide: list[Any]) -> list[torch.Tensor]:
    """Tells where results multiply an infinity of their row by a number that is 0 but for rounding,
    such as the cosine of a quarter turn: 0 makes NaN of it, and 6e-17 an infinity. Returns nothing
    where no result can.

    Only a linear function of one tensor has such factors inside. Calls of the reference with 1 at
    one core place, and 0 elsewhere, show them.
    """
    found = [i for i, value in enumerate(wide) if is_inexact(value)]
    if op.signature is None or len(found) != 1 or not wide[found[0]].isinf().any():
        return []
    (at,) = found
    x = wide[at]
    loop = x.shape[: x.dim() - len(op.signature.inputs[op.tensor_positions.index(at)].core)]
    core = math.prod(x.shape[len(loop) :])

    def of(values: torch.Tensor) -> list[torch.Tensor]:
        given = [*wide[:at], values.to(x.dtype).view(x.shape), *wide[at + 1 :]]
        return [numbers(one) for one in reference(given)]

    a, b = (f(torch.arange(x.numel(), dtype=torch.float64)) for f in (torch.sin, torch.cos))
    for one, other, both in zip(of(a), of(b), of(a - 2 * b), strict=True):
        if one.shape[: len(loop)] != loop or not torch.allclose(both, one - 2 * other):
            return []
    infinite = x.isinf().reshape(-1, core)
    opened = [torch.zeros(one.shape, dtype=torch.bool) for one in of(a)]
    for place in infinite.any(0).nonzero().flatten()[:_MOST_PLACES]:
        unit = torch.zeros(infinite.shape)
        unit[:, place] = 1
        factors = of(unit)
        here = infinite[:, place].reshape(loop)
        for is_open, factor in zip(opened, factors, strict=True):
            rows = here.view(*loop, *[1] * (factor.dim() - len(loop)))
            is_open |= rows & (factor.abs() <= NOTHING * largest(factors))
    return opened


def _one_rounding_away(first: int, value: Any) -> Any:
    """Returns the floating numbers of a tensor, every other one larger by an epsilon; ``first`` is
    0 or 1.
    """
    if not is_inexact(value) or not value.numel() or value.itemsize == 1:
        return value  # torch multiplies no float8
    return value * (1 + _alternating(value, first) * torch.finfo(value.dtype).eps)


def every_other(value: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with 0 for every other number."""
    return value if value.itemsize == 1 else value * _alternating(value, 0)


def _alternating(value: torch.Tensor, first: int) -> torch.Tensor:
    """Returns 0 and 1 in turn, in the shape and dtype of a tensor."""
    return ((torch.arange(value.numel()).view(value.shape) + first) % 2).to(value.dtype)


def _tamed(value: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with a number of each infinity's sign in its place, and not with 1, which
    a logarithm makes 0 of.
    """
    if value.is_complex():  # which torch takes no sign of
        return torch.complex(_tamed(value.real), _tamed(value.imag))
    return torch.where(value.isinf(), 1.618 * value.sign(), value)
