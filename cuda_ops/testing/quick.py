"""Compares an operator with its reference on a handful of samples, as ``compile_dev.py`` does."""

from __future__ import annotations

import math

import torch

from cuda_ops.build.advice import dev_command
from cuda_ops.errors import ResultError
from cuda_ops.spec import NO_REFERENCE, UNCHECKED_GRADIENT, WRONG_GRADIENT, OpSpec
from cuda_ops.testing.announce import announced
from cuda_ops.testing.arguments import in_order
from cuda_ops.testing.case import without_gradient
from cuda_ops.testing.checks.gradients import gradcheck
from cuda_ops.testing.compare import (
    check_fake,
    deviation,
    expected_results,
    quoted,
    refused_by,
    results,
    widened,
    without_hidden,
)
from cuda_ops.testing.draw import Draw, chosen
from cuda_ops.testing.profiles import PROFILES
from cuda_ops.testing.runner import run_check
from cuda_ops.testing.samples import MAX_NUMEL, Sample
from cuda_ops.testing.subject import HookAnswers, find, subject_of
from cuda_ops.testing.tolerance import largest, numbers
from cuda_ops.testing.worker import perform


def quick_error(op: OpSpec, plugins: HookAnswers, device: str) -> float | str:
    """Compares an operator with its reference and its fake on a handful of fixed samples.

    Samples are float32 if the operator takes it. Those that operator and reference both refuse are
    left out.

    Args:
        op: a registered operator.
        plugins: answers the hooks.
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        The largest error, relative where the expected value is above 1 and absolute below; or why
        there is none: ``no reference``, ``no samples``, ``all refused``, or no kernel for the
        device, and after a colon what to do, or how the operator refused the smallest sample. On a
        CPU the operator's own kernel, in its widest dtype, is no reference.

    Raises:
        ResultError: a result is wrong by the tolerances of the check ``reference``, or its shape,
            strides or dtype are not those of the fake.
        KitError: the kit could not compare a result.

    Example::

        registry = cuda_ops.registry.registry()
        op = registry.operators("silu")["silu"].spec
        error = quick_error(op, registry.plugins, "cpu")
    """
    return quick_comparison(op, plugins, device)[0]


def quick_comparison(op: OpSpec, plugins: HookAnswers, device: str) -> tuple[float | str, str]:
    """Returns what :func:`quick_error` does, and how many samples the operator refused, with the
    smallest of them; empty if it took all or none.
    """
    subject = subject_of(op, plugins)
    if why_not := subject.incomparable or subject.why_not(device):
        return why_not, ""
    worst = math.nan
    refusals: list[tuple[Sample, str]] = []
    dtype = torch.float32 if torch.float32 in op.dtypes else None
    has_fake = not op.is_composite and plugins.ask("cuda_ops_fake", op) is not None
    drawn = chosen(subject, Draw(4, range(1, MAX_NUMEL + 1), dtype))
    with announced(f"{op.key}: the comparison with its reference on {device}"):
        for sample in drawn:
            # The function has the operator's name, which the stack of a crash then shows.
            args = sample.make(device)
            try:
                actual = results(op, in_order(op, op.function), args)
            except Exception as error:
                if all(refused_by(subject, sample, device, error)):
                    refusals.append((sample, str(error)))
                    continue
                raise
            worst = 0.0 if math.isnan(worst) else worst
            try:
                if has_fake:
                    check_fake(op, in_order(op, op.function), args, actual)
                times = deviation(subject, sample, actual)
                wrong = times.text if not times <= 1 else ""
            except AssertionError as error:
                wrong = str(error)
            if wrong:
                raise ResultError(
                    f"{op.qualname}: wrong on {device}: {wrong}, for {sample}; "
                    f"{dev_command()} --check {op.pair} says more"
                )
            wide = widened(op, subject.reference, sample.make("cpu"))
            compared = without_hidden(op, actual, expected_results(subject, wide))
            for a, e in zip(*compared, strict=True):
                a, e = numbers(a.cpu()), numbers(e)
                # What is infinite or NaN on both sides is equal, and left out.
                worst = max(worst, largest([(a - e).abs() / e.abs().clamp(min=1.0)]))
    if math.isnan(worst):
        return f"all refused: {quoted(refusals)}", ""
    count = f"{len(refusals)} of {len(drawn)} samples"
    refused = f"{count} refused: {quoted(refusals)}" if refusals else ""
    return NO_REFERENCE if subject.is_its_own_reference(device) else worst, refused


def quick_gradient(op: OpSpec, device: str) -> str:
    """Runs the check ``gradcheck`` of a loaded operator in this process: its gradient against
    finite differences, on a few small samples.

    Returns:
        ``ok``; ``WRONG: `` and where; ``none``; or ``not checked: `` and why.
    """
    subject = find(op.key)
    if without_gradient(subject, device):
        return "none"
    with announced(f"{op.key}: the check of its gradient on {device}"):
        entry = run_check(gradcheck, subject, device, PROFILES["quick"], perform)
    if entry.passed:
        return "ok"
    is_wrong = entry.passed is False and entry.label == gradcheck.title
    return f"{WRONG_GRADIENT if is_wrong else UNCHECKED_GRADIENT}: {entry.reason}"
