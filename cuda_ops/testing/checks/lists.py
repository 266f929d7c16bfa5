"""Lists of tensors: empty ones among others, and more tensors than a kernel's arguments hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cuda_ops.derive.arguments import takes_lists
from cuda_ops.testing.case import Case, NotRunError, called, check
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.subject import Subject

#: A launch has room for some 4 KiB of arguments, thus for fewer pointers and sizes than these.
_MANY = 300
#: As many have neighbours on both sides.
_FEW = 3


def _no_lists(subject: Subject, device: str) -> str:
    return "" if takes_lists(subject.op) else "it takes no lists of tensors"


@check("lists", 12, "empty input", Draw(2, range(1, 4097)), quick=True, excuse=_no_lists)
def lists(case: Case) -> None:
    """Compares lists in which one tensor is empty, the first, one between, or the last, and lists
    of hundreds with the reference.
    """
    compared = 0
    for what, sample in _variants(case.sample):
        if (found := called(case, sample.make(case.device))) is None:
            continue
        worst = deviation(case.subject, sample, found)
        assert worst <= 1, f"{what}: {worst.text}, for {sample}"
        compared += 1
    if not compared:
        raise NotRunError("the operator refuses empty tensors in its lists, and long lists")


def _variants(sample: Sample) -> Iterator[tuple[str, Sample]]:
    at = [i for i, value in enumerate(sample.args) if _is_list(value)]
    lengths = {len(sample.args[i]) for i in at}
    if len(lengths) != 1:  # which belong together is not known
        return
    (length,) = lengths

    def changed(change: Any) -> Sample:
        args = [change(value) if i in at else value for i, value in enumerate(sample.args)]
        return replace(sample, args=tuple(args))

    times = -(-_FEW // length)
    for k in sorted({0, times * length // 2, times * length - 1}):

        def emptied(values: list[Any], k: int = k) -> list[Any]:
            return [_empty(one) if j == k else one for j, one in enumerate([*values] * times)]

        yield f"with an empty tensor at {k} of {times * length}", changed(emptied)
    times = -(-_MANY // length)
    yield f"with lists of {times * length} tensors", changed(lambda values: [*values] * times)


def _is_list(value: Any) -> bool:
    some = isinstance(value, (list, tuple)) and len(value) > 0
    return some and all(isinstance(one, TensorArg) or one is None for one in value)


def _empty(arg: Any) -> Any:
    """Returns an empty tensor of as many dims, one for a number."""
    if not isinstance(arg, TensorArg):
        return arg
    return replace(arg, shape=(0, *arg.shape[1:]), layout="contiguous")
