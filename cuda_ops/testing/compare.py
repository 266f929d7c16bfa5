"""Compares results by one table of tolerances, for each dtype and reduction length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cuda_ops.derive.arguments import bind, tensor_arguments
from cuda_ops.derive.checks import check_arguments
from cuda_ops.derive.layout import broadcast
from cuda_ops.errors import ResultError
from cuda_ops.spec import OpSpec
from cuda_ops.testing.announce import announced
from cuda_ops.testing.arguments import in_order
from cuda_ops.testing.samples import MAX_NUMEL, Sample, TensorArg
from cuda_ops.testing.subject import HookAnswers, Subject, subject_of

#: The error that one result may have, in units of the dtype's epsilon. Half precision is rounded
#: once from float32; wider dtypes are computed in their own precision, with a device's own exp.
EPSILONS = {torch.float64: 32.0, torch.float32: 32.0, torch.float16: 4.0, torch.bfloat16: 4.0}
#: The dtype that sums of half precision are taken in, unless an operator claims to round in
#: between. Their errors grow with the square root of the number of terms.
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
#: For every other floating dtype, float8 among them.
_OTHER_EPSILONS = 2.0


class Deviation(float):
    """The largest error in units of the tolerance; more than 1 is wrong."""

    #: Where it is, and the values there: ``": at [0, 3] got 0, expected -128"``.
    place: str = ""

    @property
    def text(self) -> str:
        return f"the error is {self:.3g} times the tolerance{self.place}"


def outputs(result: Any) -> tuple[Any, ...]:
    """Returns an operator's result, always as a tuple."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def tensors(values: Any) -> list[torch.Tensor]:
    """Returns the tensors among arguments or outputs."""
    return [value for value in outputs(values) if isinstance(value, torch.Tensor)]


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what a fake must get right; ``None`` for the stride of a dim never stepped along."""
    used = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(stride if size > 1 and tensor.numel() else None for size, stride in used)
    return tuple(tensor.shape), strides, tensor.dtype, str(tensor.device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether tensors are equal to the bit: NaN equals itself, and -0.0 is not 0.0."""

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)

    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    return alike and (not a.numel() or torch.equal(as_bytes(a), as_bytes(b)))


def widened(sample: Sample) -> list[Any]:
    """Returns the sample's arguments on the CPU, floating ones in float64."""
    return [v.to(torch.float64) if is_floating(v) else v for v in sample.make("cpu")]


def deviation(
    subject: Subject, sample: Sample, actual: Any, wide: list[Any] | None = None
) -> Deviation:
    """Returns the largest error against the reference.

    NaN equals NaN, an infinity only itself. ``wide`` holds the arguments of the call as
    :func:`widened` returns them, if they are not the sample's.

    Raises:
        AssertionError: a shape differs, or a result that is not floating.
    """
    assert subject.reference is not None
    reference = in_order(subject.op, subject.reference)
    wide = widened(sample) if wide is None else wide
    expected = reference(*wide)
    length = reduction_length(subject.op, sample, subject.claims.sums_over)
    if length > 1:
        # Cancellation makes a small result as wrong as its summands.
        magnitude = largest(reference(*(v.abs() if is_floating(v) else v for v in wide)))
    else:
        magnitude = min(1.0, largest(wide))
    claims = subject.claims
    given = [epsilon(v.dtype) for v in sample.make("meta") if is_floating(v)]
    least = max(given, default=0.0) if claims.rounds_between else 0.0
    return errors(
        outputs(actual), outputs(expected), magnitude, length, factor=claims.tolerance, least=least
    )


def epsilon(dtype: torch.dtype) -> float:
    """Returns the relative error that one result of this dtype may have."""
    return EPSILONS.get(dtype, _OTHER_EPSILONS) * torch.finfo(dtype).eps


def errors(
    actual: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    magnitude: float,
    length: int = 1,
    *,
    factor: float = 1.0,
    least: float = 0.0,
) -> Deviation:
    """Returns the largest error in units of ``factor`` times the table's tolerance.

    The tolerance is relative to the result and, for sums of ``length`` numbers, also to the size
    ``magnitude`` of what was added up. No epsilon of the table counts as less than ``least``.

    Raises:
        AssertionError: a shape differs, or a result that is not floating.
    """
    worst = Deviation(0)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        name = f"result {i} " if len(actual) > 1 else ""
        assert a.shape == e.shape, f"shape {list(a.shape)}, expected {list(e.shape)}"
        a, e = a.detach().cpu(), e.detach().cpu()
        if not a.is_floating_point():
            e = e.to(a.dtype)
            assert torch.equal(a, e), f"the result differs: {name}{_place(a != e, a, e)}"
            continue
        tiny = torch.finfo(a.dtype).tiny
        unit = max(epsilon(a.dtype), least)
        summed = max(epsilon(_SUMMED_IN.get(a.dtype, a.dtype)), least) if length > 1 else unit
        # What overflows the dtype is infinite in the reference too.
        e = e.to(a.dtype).to(torch.float64)
        allowed = factor * (unit * e.abs() + summed * math.sqrt(length) * magnitude)
        a = a.to(torch.float64)
        same = (a == e) | (a.isnan() & e.isnan())
        error = torch.where(same, 0.0, (a - e).abs() / (allowed + tiny))
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


def same(actual: Any, expected: Any, what: str, factor: float = 1.0) -> None:
    """Compares two runs of the same arithmetic, perhaps in another order.

    Raises:
        AssertionError: they differ by more than the table allows; the text starts with ``what``.
    """
    magnitude = largest(tensors(expected))
    worst = errors(tensors(actual), tensors(expected), magnitude, factor=factor)
    assert worst <= 1, f"{what}: {worst.text}"


def largest(values: Any) -> float:
    """Returns the largest finite magnitude among floating tensors; 0 if there is none."""
    floating = [v.detach() for v in outputs(values) if is_floating(v)]
    finite = [v.to(torch.float64).abs()[v.isfinite()] for v in floating]
    return max((v.max().item() for v in finite if v.numel()), default=0.0)


def reduction_length(op: OpSpec, sample: Sample, sums_over: Sequence[str] | None = None) -> int:
    """Returns how many elements one result may be a sum of: 1 if elementwise, else by core dims.

    Those of ``sums_over`` count, without them all that no result has.
    """
    if op.signature is None:
        return max((size for arg in sample.tensors for size in arg.shape), default=1)
    if op.signature.is_elementwise:
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


def is_refused(subject: Subject, sample: Sample, device: str, error: Exception) -> bool:
    """Tells whether an error means that the sample is invalid, such as the largest of no numbers
    or a parameter that must not be 0.

    Then operator and reference both refuse it in contiguous tensors too. An operator of cuda_ops
    must also name the argument.
    """

    def contiguous(arg: TensorArg) -> TensorArg:
        return replace(arg, layout="contiguous")

    op, text = subject.op, str(error)
    if subject.reference is None or "CUDA error" in text:  # a fault
        return False
    if op.namespace == "cuda_ops" and ": argument '" not in text:
        return False
    for function, arguments in (
        (op.overload, sample.with_tensors(contiguous).make(device)),
        (subject.reference, widened(sample)),
    ):
        try:
            in_order(op, function)(*arguments)
        except Exception:
            continue
        return False
    return True


def quick_error(op: OpSpec, plugins: HookAnswers, device: str) -> float:
    """Compares an operator with its reference on a handful of fixed samples.

    Samples are float32 if the operator takes it. Those that operator and reference both refuse are
    left out.

    Args:
        op: a registered operator.
        plugins: answers the hooks.
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        The largest error, relative where the expected value is above 1 and absolute below; ``nan``
        if the operator has no reference, no samples or no kernel for the device.

    Raises:
        ResultError: a result is wrong by the tolerances of the check ``reference``.

    Example::

        registry = cuda_ops.registry.registry()
        op = registry.operators("silu")["silu"].spec
        error = quick_error(op, registry.plugins, "cpu")
    """
    from cuda_ops.testing.draw import Draw, chosen

    subject = subject_of(op, plugins)
    if subject.incomparable or subject.why_not(device) or subject.reference is None:
        return math.nan
    worst = math.nan
    dtype = torch.float32 if torch.float32 in op.dtypes else None
    samples = chosen(subject, Draw(4, range(1, MAX_NUMEL + 1), dtype))
    with announced(f"{op.name}: the comparison with its reference on {device}"):
        for sample in samples:
            # The function has the operator's name, which the stack of a crash then shows.
            try:
                actual = in_order(op, op.function)(*sample.make(device))
            except Exception as error:
                if is_refused(subject, sample, device, error):
                    continue
                raise
            worst = 0.0 if math.isnan(worst) else worst
            expected = in_order(op, subject.reference)(*widened(sample))
            try:
                times = deviation(subject, sample, actual)
                wrong = times.text if not times <= 1 else ""
            except AssertionError as error:
                wrong = str(error)
            if wrong:
                raise ResultError(
                    f"{op.qualname}: wrong on {device}: {wrong}, for {sample}; "
                    f"compile_dev.py --check {op.stem} says more"
                )
            for a, e in zip(outputs(actual), outputs(expected), strict=True):
                a, e = a.cpu().to(torch.float64), e.to(torch.float64)
                # What is infinite or NaN on both sides is equal, and left out.
                worst = max(worst, largest((a - e).abs() / e.abs().clamp(min=1.0)))
    return worst
