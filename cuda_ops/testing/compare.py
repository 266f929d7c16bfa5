"""Compares results by one table of tolerances, for each dtype and reduction length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from cuda_ops.derive.arguments import bind, tensor_arguments
from cuda_ops.derive.checks import check_arguments
from cuda_ops.derive.layout import broadcast, is_elementwise
from cuda_ops.errors import KitError
from cuda_ops.spec import OpSpec
from cuda_ops.testing import progress
from cuda_ops.testing.arguments import each, in_order, sampled_arguments, spread
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.subject import Subject

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
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
#: For every other floating dtype, float8_e4m3fn and float8_e5m2 among them.
_OTHER_EPSILONS = 2.0


#: Dtypes to which what is too large becomes NaN in some versions of torch, and the largest number
#: in others; both count as right.
_WITHOUT_INFINITY = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Deviation(float):
    """The largest error in units of the tolerance; more than 1 is wrong."""

    #: Where it is, and the values there: ``": at [0, 3] got 0, expected -128"``.
    place: str = ""

    @property
    def text(self) -> str:
        return f"the error is {self:.3g} times the tolerance{self.place}"


def outputs(result: Any) -> tuple[Any, ...]:
    """Returns an operator's result, always as a tuple; lists in it are spread out."""
    if result is None:  # it only writes its arguments
        return ()
    if isinstance(result, (tuple, list)):
        return tuple(output for part in result for output in outputs(part))
    return (result,)


def results(
    op: OpSpec, function: Callable[..., Any], values: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """Calls a function; returns its outputs, and what the arguments that it changes then hold.

    Those get their values back, so that a check may use them again.

    Raises:
        KitError: an output is neither a tensor nor a number.
    """
    changed = tensors([values[i] for i in op.written if i < len(values)])
    before = [value.detach().clone() for value in changed]
    found = function(*values)
    after = tuple(map(_as_tensor, outputs(found))) if op.parsed.returns else ()
    if changed:
        # An output may be the changed argument itself.
        after = tuple(value.clone() for value in (*after, *changed))
        with torch.no_grad():
            for value, old in zip(changed, before, strict=True):
                value.copy_(old)
    return after


def _as_tensor(output: Any) -> torch.Tensor:
    if isinstance(output, (bool, int, float, complex)):
        return torch.tensor(output)
    if not isinstance(output, torch.Tensor):
        raise KitError(f"the kit could not compare a result of type {type(output).__name__}")
    return output


def tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors among arguments or outputs."""
    return [value for value in spread(values) if isinstance(value, torch.Tensor)]


def is_floating(value: Any) -> bool:
    """Tells whether a value is a tensor of floating numbers, other than packed ones."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != PAIRS


def is_inexact(value: Any) -> bool:
    """Tells whether a value is a tensor of floating or complex numbers."""
    return is_floating(value) or (isinstance(value, torch.Tensor) and value.is_complex())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's numbers in float64 or complex128; pairs get one more dim."""
    if tensor.dtype != PAIRS:
        return tensor.to(_wide(tensor.dtype))
    codes = tensor.contiguous().view(torch.uint8)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).to(torch.int64)
    values = _PAIR_VALUES[nibbles & 7]
    return torch.where(nibbles > 7, -values, values)


def described(tensor: torch.Tensor, fake: torch.Tensor) -> tuple[Any, ...]:
    """Returns what a fake must get right; ``None`` for the stride of a dim never stepped along, and
    for the sizes and all strides that the fake cannot know as they depend on the data.
    """
    unknown = [isinstance(size, torch.SymInt) for size in fake.shape]
    if any(unknown):
        free = itertools.zip_longest(tensor.shape, unknown)
        shape = tuple(None if is_unknown else size for size, is_unknown in free)
        return shape, None, tensor.dtype, str(tensor.device)
    used = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(stride if size > 1 and tensor.numel() else None for size, stride in used)
    return tuple(tensor.shape), strides, tensor.dtype, str(tensor.device)


def check_fake(
    op: OpSpec, call: Callable[..., Any], values: Sequence[Any], actual: Sequence[torch.Tensor]
) -> None:
    """Compares the outputs of a call with what the operator's fake foretells for its arguments.

    A size that depends on the data is not compared.

    Raises:
        AssertionError: the fake raised, or shape, strides, dtype or device of an output differ.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:

        def faked(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return mode.from_tensor(value, static_shapes=True) if is_tensor else value

        fakes = [each(faked, value) for value in values]
        try:
            foretold = results(op, call, fakes)
        except Exception as error:
            raise AssertionError(f"the fake raised {type(error).__name__}: {error}") from error
    said, real = (
        [described(one, like) for one, like in zip(some, foretold, strict=False)]
        for some in (foretold, actual)
    )
    alike = said == real and len(foretold) == len(actual)
    assert alike, f"the fake says {said}, the real output is {real}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether tensors are equal to the bit: NaN equals itself, and -0.0 is not 0.0."""

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)

    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    return alike and (not a.numel() or torch.equal(as_bytes(a), as_bytes(b)))


def widened(op: OpSpec, reference: Callable[..., Any] | None, values: Sequence[Any]) -> list[Any]:
    """Returns the arguments as a reference gets them: floating ones in float64, complex ones alike.
    The operator's own kernel gets an argument that may not be float64 in the widest dtype that it
    may have.
    """
    own = getattr(reference, "func", reference) is op.overload  # perhaps a partial of it

    def wide(name: str, value: Any) -> Any:
        if not is_inexact(value):
            return value
        best = _wide(value.dtype)
        allowed = [d for d in op.allowed_dtypes(name) if d.is_complex == value.is_complex()]
        if own and allowed and best not in allowed:
            best, *others = sorted(allowed, key=lambda d: -d.itemsize)
            if any(other.itemsize == best.itemsize for other in others):
                best = value.dtype  # neither holds the other
        return value.to(best)

    named = zip(op.argument_names, values, strict=False)
    return [each(partial(wide, name), value) for name, value in named]


def expected_results(subject: Subject, values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns what :func:`results` gives for the reference.

    Raises:
        KitError: the reference raised.
    """
    assert subject.reference is not None
    try:
        return results(subject.op, in_order(subject.op, subject.reference), values)
    except KitError:
        raise
    except Exception as error:
        text = f"the reference raised {type(error).__name__}: {error}".strip()
        raise KitError(f"the kit could not compare the result: {text}") from error


def without_hidden(
    op: OpSpec, actual: Sequence[Any], expected: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns both, neither of them with hidden outputs if one does not have them."""

    def seen(found: Sequence[Any], other: Sequence[Any]) -> Sequence[Any]:
        if len(found) - len(other) != len(op.hidden):
            return found
        return (*found[: op.shown], *found[op.shown + len(op.hidden) :])

    return seen(actual, expected), seen(expected, actual)


@progress.judging()
def deviation(
    subject: Subject,
    sample: Sample,
    actual: Any,
    wide: list[Any] | None = None,
    *,
    ends_alike: bool = False,
    factor: float = 1.0,
    rounded: bool = True,
) -> Deviation:
    """Returns the largest error against the reference.

    NaN equals NaN, an infinity only itself, unless ``ends_alike`` says that all which is not finite
    is equal. ``factor`` multiplies the tolerance, and with ``rounded`` the reference is rounded to
    the result's dtype first. ``wide`` holds the arguments of the call as
    :func:`widened` returns them, if they are not the sample's.

    Raises:
        AssertionError: a shape differs, or a result that is not floating.
        KitError: the reference raised.
    """
    if wide is None:
        wide = widened(subject.op, subject.reference, sample.make("cpu"))
    actual, expected = without_hidden(subject.op, outputs(actual), expected_results(subject, wide))
    length = reduction_length(subject.op, sample, subject.claims.sums_over)
    if length > 1:
        # Cancellation makes a small result as wrong as its summands.
        sizes = [each(lambda v: size_of(v) if is_inexact(v) else v, value) for value in wide]
        # A negative number beside the tensors may make that of their sizes tiny.
        magnitude = largest([*expected_results(subject, sizes), *expected])
    else:
        # What is drawn at random has a size of its own, whatever the arguments.
        measured = tensors(wide) if tensors(wide) and not subject.op.random else expected
        magnitude = min(1.0, largest(measured))
    least = least_epsilon(subject, sample)
    factor *= subject.claims.tolerance
    judged = partial(
        errors, actual, expected, length=length, factor=factor, least=least, rounded=rounded
    )
    worst = judged(magnitude=magnitude)
    if worst <= 1:
        return worst
    # What the same formulas on another device make of an infinity may depend on their order.
    ends_alike |= subject.reference is subject.op.overload
    # What overflows where it is rounded on the way makes NaN of another infinity.
    finite = all(value.isfinite().all() for value in tensors(wide) if is_inexact(value))
    ends_alike |= subject.claims.rounds_between and finite
    try:

        def reference(values: list[Any]) -> Sequence[Any]:
            found = expected_results(subject, values)
            return without_hidden(subject.op, actual, found)[1]

        doubts = _doubts(subject.op, reference, wide, actual, expected, ends_alike)
        far = "wide" in (sample.values, *(arg.values for arg in sample.tensors))
        if far and subject.op.signature is not None and is_elementwise(subject.op):
            doubts = _multiplied(doubts, wide, actual)
        if length > 1 and magnitude <= _NOTHING * largest(tensors(sizes)):
            # Equal numbers cancel as their sizes do, and not where every other one is 0.
            apart = [each(lambda v: _every_other(v) if is_inexact(v) else v, v) for v in sizes]
            magnitude = max(magnitude, largest(expected_results(subject, apart)))
    except KitError:  # the reference refuses such arguments
        if not ends_alike:
            return worst
        doubts = [
            Doubt(torch.zeros(e.shape, dtype=torch.float64), torch.ones(e.shape, dtype=torch.bool))
            for e in expected
        ]
    return judged(magnitude=magnitude, doubts=doubts)


class Doubt(NamedTuple):
    """What one of the reference's results leaves open, by number: how far off it may be, and
    whether an infinity or NaN may be another.
    """

    by: torch.Tensor
    ends: torch.Tensor


_Reference = Callable[[list[Any]], Sequence[Any]]


def _doubts(
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


def _multiplied(doubts: list[Doubt], wide: list[Any], actual: Sequence[Any]) -> list[Doubt]:
    """Adds what the arguments at each place may have multiplied a rounding inside of a formula by:
    of ``gate * (1 + tanh(x))`` a gate of a thousand makes a thousand epsilons.
    """
    sizes = [numbers(value).abs().clamp(min=1) for value in tensors(wide) if is_inexact(value)]
    most = math.prod(torch.broadcast_tensors(*sizes), start=torch.tensor(1.0)).nan_to_num(0.0, 0.0)
    found = []
    for doubt, a in zip(doubts, actual, strict=True):
        if is_inexact(a) and most.shape == doubt.by.shape:
            dtype = _SUMMED_IN.get(a.dtype, a.dtype)
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
            is_open |= rows & (factor.abs() <= _NOTHING * largest(factors))
    return opened


#: How many core places of infinities are looked at.
_MOST_PLACES = 64
#: What rounding in float64 leaves of numbers that cancel, relative to them.
_NOTHING = 1e-12
#: How many times smaller than the largest number a result may be that overflows on the way.
_NEARLY = 256
#: How many times the change by one rounding of each argument counts.
_ROUNDINGS = 8
#: The largest factor by which a rounding may have been multiplied.
_MOST_MULTIPLIED = 1000.0


def _one_rounding_away(first: int, value: Any) -> Any:
    """Returns the floating numbers of a tensor, every other one larger by an epsilon; ``first`` is
    0 or 1.
    """
    if not is_inexact(value) or not value.numel() or value.itemsize == 1:
        return value  # torch multiplies no float8
    return value * (1 + _alternating(value, first) * torch.finfo(value.dtype).eps)


def _every_other(value: torch.Tensor) -> torch.Tensor:
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


def least_epsilon(subject: Subject, sample: Sample) -> float:
    """Returns what no epsilon counts as less than: that of the arguments, for an operator that
    claims to keep intermediate values in their dtype.
    """
    if not subject.claims.rounds_between:
        return 0.0
    given = (epsilon(v.dtype) for v in tensors(sample.make("meta")) if is_inexact(v))
    return max(given, default=0.0)


def size_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sizes of the numbers of a floating or complex tensor, in its dtype."""
    if tensor.dtype == torch.float8_e8m0fnu:  # positive, and torch has no abs for it
        return tensor
    return tensor.abs().to(tensor.dtype)


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
        summed = max(epsilon(_SUMMED_IN.get(a.dtype, a.dtype)), least) if length > 1 else unit
        beyond = None
        if dtype in _WITHOUT_INFINITY:
            beyond = numbers(e).abs() > torch.finfo(dtype).max
        # What overflows the dtype is infinite in the reference too, but where the tolerance leaves
        # open whether it does: summands that cancel may be far larger than their sum.
        near, exact = (v.to(_wide(a.dtype)) for v in (e.to(a.dtype), e))
        reach = factor * (unit * exact.abs() + summed * math.sqrt(length) * magnitude)
        within = exact.isfinite() & (exact.abs() - reach <= most)
        e = torch.where(within, exact, near)
        e = torch.where(near.isfinite(), near if rounded else exact, e)
        allowed = factor * (unit * e.abs() + summed * math.sqrt(length) * magnitude)
        a = a.to(_wide(a.dtype))
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


def largest(values: Sequence[Any]) -> float:
    """Returns the largest finite magnitude among floating tensors; 0 if there is none."""
    sizes = [v.detach().to(_wide(v.dtype)).abs() for v in values if is_inexact(v)]
    finite = [size[size.isfinite()] for size in sizes]
    return max((v.max().item() for v in finite if v.numel()), default=0.0)


def reduction_length(op: OpSpec, sample: Sample, sums_over: Sequence[str] | None = None) -> int:
    """Returns how many elements one result may be a sum of: 1 if elementwise, else by core dims.

    Those of ``sums_over`` count, without them all that no result has.
    """
    if op.signature is None:
        return max((size for arg in sample.tensors for size in arg.shape), default=1)
    if is_elementwise(op) or op.device_position is not None:
        return 1
    values = bind(op, sample.make("meta"), {})
    bound, outputs = check_arguments(op, values), op.signature.outputs
    kept = {dim for group in outputs for dim in group.core}
    over = bound.keys() - kept if sums_over is None else bound.keys() & set(sums_over)
    summed = math.prod(bound[dim] for dim in over)
    if not all(group.loops for group in outputs):
        summed *= math.prod(broadcast(op, tensor_arguments(op, values)))
    longest: int = max(2, summed, *bound.values())
    return longest


def quoted(refusals: Sequence[tuple[Sample, str]]) -> str:
    """Returns how the operator refused the smallest of some samples, and that sample."""
    sample, said = min(refusals, key=lambda refusal: refusal[0].size)
    return f"{said}, for {sample}"


def refused_by(
    subject: Subject, sample: Sample, device: str, error: Exception
) -> tuple[bool, bool]:
    """Tells whether an error means that the operator refuses the sample, in contiguous tensors too,
    and whether its reference does: then the sample is invalid, such as the largest of no numbers or
    a parameter that must not be 0.

    An operator of cuda_ops must also name the argument, unless a guest computes it.
    """

    def contiguous(arg: TensorArg) -> TensorArg:
        return replace(arg, layout="contiguous")

    def raises(function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
        try:
            in_order(op, function)(*arguments)
        except Exception:
            return True
        return False

    op, text = subject.op, str(error)
    if subject.reference is None or "CUDA error" in text:  # a fault
        return False, False
    if not (op.foreign or op.guest) and ": argument '" not in text:
        return False, False
    if not raises(op.overload, sample.with_tensors(contiguous).make(device)):
        return False, False
    with progress.judging():
        wide = widened(op, subject.reference, sample.make("cpu"))
        return True, raises(subject.reference, wide)
