"""Compares results with those of a reference, by the table of :mod:`.tolerance`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cuda_ops.derive.arguments import bind, tensor_arguments
from cuda_ops.derive.checks import check_arguments
from cuda_ops.derive.layout import broadcast, is_elementwise
from cuda_ops.errors import KitError
from cuda_ops.spec import OpSpec
from cuda_ops.testing import progress
from cuda_ops.testing.arguments import each, in_order
from cuda_ops.testing.doubts import NOTHING, doubts_of, every_other, multiplied_by_arguments
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import (
    Deviation,
    Doubt,
    epsilon,
    errors,
    is_inexact,
    largest,
    size_of,
    tensors,
    wide_dtype,
)


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


def widened(op: OpSpec, reference: Callable[..., Any] | None, values: Sequence[Any]) -> list[Any]:
    """Returns the arguments as a reference gets them: floating ones in float64, complex ones alike.
    The operator's own kernel gets an argument that may not be float64 in the widest dtype that it
    may have.
    """
    own = getattr(reference, "func", reference) is op.overload  # perhaps a partial of it

    def wide(name: str, value: Any) -> Any:
        if not is_inexact(value):
            return value
        best = wide_dtype(value.dtype)
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

        doubts = doubts_of(subject.op, reference, wide, actual, expected, ends_alike)
        far = "wide" in (sample.values, *(arg.values for arg in sample.tensors))
        if far and subject.op.signature is not None and is_elementwise(subject.op):
            doubts = multiplied_by_arguments(doubts, wide, actual)
        if length > 1 and magnitude <= NOTHING * largest(tensors(sizes)):
            # Equal numbers cancel as their sizes do, and not where every other one is 0.
            apart = [each(lambda v: every_other(v) if is_inexact(v) else v, v) for v in sizes]
            magnitude = max(magnitude, largest(expected_results(subject, apart)))
    except KitError:  # the reference refuses such arguments
        if not ends_alike:
            return worst
        doubts = [
            Doubt(torch.zeros(e.shape, dtype=torch.float64), torch.ones(e.shape, dtype=torch.bool))
            for e in expected
        ]
    return judged(magnitude=magnitude, doubts=doubts)


def least_epsilon(subject: Subject, sample: Sample) -> float:
    """Returns what no epsilon counts as less than: that of the arguments, for an operator that
    claims to keep intermediate values in their dtype.
    """
    if not subject.claims.rounds_between:
        return 0.0
    given = (epsilon(v.dtype) for v in tensors(sample.make("meta")) if is_inexact(v))
    return max(given, default=0.0)


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

    Where its reference takes the sample, an operator of cuda_ops must also name the argument,
    unless a guest computes it.
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
    if not raises(op.overload, sample.with_tensors(contiguous).make(device)):
        return False, False
    with progress.judging():
        wide = widened(op, subject.reference, sample.make("cpu"))
        by_both = raises(subject.reference, wide)
    names_it = op.foreign or bool(op.guest) or ": argument '" in text
    return by_both or names_it, by_both
