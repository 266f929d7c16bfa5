"""What torch's operators do on a CPU in place of an operator's kernel."""

from __future__ import annotations

from cuda_ops.dispatch import by_torch as running
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import Subject


def _nothing_of_torch(subject: Subject, device: str) -> str:
    return "" if subject.op.by_torch else "a CPU runs the operator's own kernel"


def _as_drawn(sample: Sample) -> Sample:
    return sample


@check("by_torch", None, "torch's operators give something else", Draw(adapt=_as_drawn),
       devices=("cpu",), quick=True, excuse=_nothing_of_torch)  # fmt: skip
def by_torch(case: Case) -> None:
    """Compares what torch's operators give with the reference, in any layout and with any values,
    and dtypes and strides with those of the operator's own kernel.
    """
    expected = case.call(*case.arguments())
    with running.kernels(True):
        found = case.call(*case.arguments())
    for k, (mine, torchs) in enumerate(zip(expected, found, strict=True)):
        for what, own, other in (
            ("dtype", mine.dtype, torchs.dtype),
            ("shape", [*mine.shape], [*torchs.shape]),
            ("strides", mine.stride(), torchs.stride()),
        ):
            assert own == other, f"output {k}: {what} {own} by the operator, {other} by torch"
    worst = deviation(case.subject, case.sample, found)
    assert worst <= 1, worst.text
