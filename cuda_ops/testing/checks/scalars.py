"""Class 7: numbers beside the tensors: what float32 or 32 bits do not hold, and edge values."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.errors import KitError
from cuda_ops.spec import OpSpec, Range
from cuda_ops.testing.arguments import sampled_arguments
from cuda_ops.testing.case import Case, NotRunError, called, check
from cuda_ops.testing.checks.gradient_edges import compare_gradients, no_other_gradient
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.subject import ITSELF, Subject

#: None but 0 and those that are not finite is a float32.
_FLOATS = (0.1, 1 / 3, -0.7, 1e-8, 16777217.0, 0.0, -0.0, 1e18, math.inf, -math.inf, math.nan)
#: Those beside which gradients are compared too.
_DIFFERENTIATED = (-0.7, 0.0)
_INTS = (0, -1, 2, 3, 7, 2**31, -(2**31) - 1, 2**33 + 1)


def _numbers(subject: Subject) -> dict[int, Sequence[float]]:
    """Returns by position of an argument the values that its type and its range allow. A size is
    left out, which a large number would make an allocation of.
    """
    op, found = subject.op, dict[int, Sequence[float]]()
    sizes = () if op.signature is None else op.signature.int_names
    for i, argument in enumerate(sampled_arguments(op)):
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        name = argument.name
        if kind == "float":
            within = op.float_ranges.get(name)
            found[i] = [v for v in _FLOATS if within is None or v in within]
        elif kind == "int" and name not in sizes and name not in op.limits:
            allowed = op.ranges.get(name, Range(-(2**63), 2**63 - 1))
            found[i] = [v for v in _INTS if v in allowed]
    return found


def _compare_lists(case: Case, whole: Sample) -> int:
    """Compares lists of dims in the other order, and counted from the end, all of them or every
    other one, with the reference. Returns how many calls were compared.

    Raises:
        AssertionError: one is wrong; or both ends are counted from, and the operator refuses to do
            so in one list.
    """
    rank, compared = max((len(arg.shape) for arg in whole.tensors), default=0), 0
    for i in _list_positions(case.subject):
        given = whole.args[i] if i < len(whole.args) else None
        if not isinstance(given, (list, tuple)) or not given:
            continue
        name, refused = case.subject.op.argument_names[i], []
        ends = [d + rank if d < 0 else d for d in given], [d - rank if d >= 0 else d for d in given]
        mixed = [[ends[(k + first) % 2][k] for k in range(len(given))] for first in range(2)]
        for way in (*ends, list(given)[::-1], *mixed, *(one[::-1] for one in mixed)):
            sample = replace(whole, args=(*whole.args[:i], way, *whole.args[i + 1 :]))
            if (found := called(case, sample.make(case.device))) is None:
                refused.append(way)
                continue
            try:
                worst = deviation(case.subject, sample, found)
            except KitError as error:
                raise AssertionError(f"the operator takes {name}={way!r}, and {error}") from error
            assert worst <= 1, f"{name}={way!r}: {worst.text}"
            compared += 1
        text = f"the operator takes {name}={ends[0]} and {ends[1]}, and refuses {refused[:1]}"
        assert not refused or any(end in refused for end in ends), text
    return compared


def _list_positions(subject: Subject) -> list[int]:
    arguments = enumerate(sampled_arguments(subject.op))
    return [i for i, argument in arguments if "List[int]" in str(argument.real_type)]


def _no_numbers(subject: Subject, device: str) -> str:
    if subject.is_its_own_reference(device):
        return ITSELF
    numbers = any(_numbers(subject).values()) or _list_positions(subject)
    return "" if numbers else "it takes no numbers"


def _widest(case: Case) -> Sample:
    """Returns the sample in float64, where the operator takes that, to show how numbers round."""
    op = case.subject.op
    named = dict(zip(op.argument_names, case.sample.args, strict=False))
    floating = [
        name
        for name, arg in named.items()
        if isinstance(arg, TensorArg) and arg.dtype.is_floating_point
    ]
    if not all(torch.float64 in op.allowed_dtypes(name) for name in floating):
        return case.sample
    args = [
        replace(arg, dtype=torch.float64) if name in floating else arg
        for name, arg in named.items()
    ]
    return replace(case.sample, args=tuple(args))


def _of_odd_sizes(op: OpSpec) -> list[Sample]:
    """Returns calls whose sizes are no powers of two: modulo such a one, a number is the same after
    its upper bits are cut off.
    """
    return [shaped(op, (3, 13), core=11), shaped(op, (37,), core=5, seed=1)]


@check("scalars", 7, "a number is rounded, cut off or misread",
       Draw(2, range(32, 513), beside=_of_odd_sizes), quick=True,
       excuse=_no_numbers)  # fmt: skip
def scalars(case: Case) -> None:
    """Compares numbers that float32 or 32 bits do not hold, negative ones, zeros, huge ones,
    infinities and NaN with the reference, and gradients beside negative ones and zeros. The
    operator may refuse them, and must where its reference does.
    """
    whole, refused = _widest(case), ""
    shapes = _shapes(case, whole)
    # What the same formulas on another device make of an infinity, or refuse, proves nothing.
    is_apart = case.subject.reference is not case.subject.op.overload
    has_gradient = is_apart and not no_other_gradient(case.subject, case.device)
    # A gradient that is wrong beside any number is for other checks to name.
    has_gradient = has_gradient and _is_gradient_right(replace(case, sample=whole))
    compared = _compare_lists(case, whole) if is_apart else 0
    for i, values in _numbers(case.subject).items():
        name = case.subject.op.argument_names[i]
        for value, others in itertools.product(values, _others(case.subject, whole, i)):
            if not (is_apart or math.isfinite(value)):
                continue
            sample = replace(whole, args=(*others[:i], value, *others[i + 1 :]))
            made = _shapes(case, sample)
            if isinstance(value, int) and made not in (None, shapes):
                continue  # a size after all
            if (found := called(case, sample.make(case.device))) is None:
                refused = f"the operator refuses {name}={value}"
                continue
            # What an infinite or missing number leads to need not be the same end.
            alike = not math.isfinite(value)
            try:
                worst = deviation(case.subject, sample, found, ends_alike=alike)
            except KitError as error:
                if is_apart:
                    text = f"the operator takes {name}={value!r}, and {error}"
                    raise AssertionError(text) from error
                refused = f"{name}={value}: {error}"
                continue
            compared += 1
            assert worst <= 1, f"{name}={value!r}: {worst.text}"
            if has_gradient and value in _DIFFERENTIATED:
                _compare_gradient(replace(case, sample=sample), f"{name}={value!r}")
    if not compared:
        raise NotRunError(refused or "each number is a size")


def _others(subject: Subject, whole: Sample, position: int) -> list[tuple[Any, ...]]:
    """Returns the arguments beside one number, as they are drawn and, if there are other floats,
    with 0 for those: one may hide another, as a limit does that nothing exceeds.
    """
    if position >= len(whole.args):
        return []
    floats = {
        i: 0.0
        for i, values in _numbers(subject).items()
        if i != position and i < len(whole.args) and isinstance(whole.args[i], float)
        if 0.0 in values
    }
    zeroed = tuple(floats.get(i, value) for i, value in enumerate(whole.args))
    return [whole.args, zeroed] if floats else [whole.args]


def _is_gradient_right(case: Case) -> bool:
    try:
        compare_gradients(case, count=4)
    except (AssertionError, NotRunError, KitError, RuntimeError):
        return False
    return True


def _compare_gradient(case: Case, what: str) -> None:
    with contextlib.suppress(NotRunError, KitError):
        try:
            compare_gradients(case, count=4)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error


def _shapes(case: Case, sample: Sample) -> list[Any] | None:
    """Returns the shapes of the results, by the fake, which allocates nothing; ``None`` if it
    refuses the arguments.
    """
    with FakeTensorMode() as mode:
        args = [
            mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in sample.make("cpu")
        ]
        try:
            return [tuple(out.shape) for out in case.call(*args)]
        except Exception:
            return None
