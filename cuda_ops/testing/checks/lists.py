"""Lists of tensors: empty ones among others, more tensors than a kernel's arguments hold, and lists
that do not fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from cuda_ops.derive.arguments import takes_lists
from cuda_ops.errors import KitError
from cuda_ops.testing.case import Case, NotRunError, called, check
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.subject import Subject

#: A launch has room for some 4 KiB of arguments, thus for fewer pointers and sizes than these.
_MANY = 300
#: What is narrower or wider than the other tensors: read as theirs, it is wrong, or too short.
_OTHER_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
#: No tensor that is drawn has this shape.
_LONGER = (5, 4099)
#: As many have neighbors on both sides.
_FEW = 3


def _no_lists(subject: Subject, device: str) -> str:
    return "" if takes_lists(subject.op) else "it takes no lists of tensors"


@check("lists", 12, "empty input", Draw(2, range(1, 4097)), quick=True, excuse=_no_lists)
def lists(case: Case) -> None:
    """Compares lists in which one tensor is empty, the first, one between, or the last, and lists
    of hundreds with the reference.
    """
    if not _compared(case, _variants(case.sample)):
        raise NotRunError("the operator refuses empty tensors in its lists, and long lists")


@check("mixed_lists", None, "lists that do not fit together are taken", Draw(2, range(1, 4097)),
       quick=True, excuse=_no_lists)  # fmt: skip
def mixed_lists(case: Case) -> None:
    """Checks that lists whose tensors differ in dtype, shape or number are refused, or that the
    result is the reference's.
    """
    _compared(case, _misfits(case.sample))


def _compared(case: Case, variants: Iterable[tuple[str, Sample]]) -> int:
    """Returns how many of the calls the operator took; each must be right."""
    compared = 0
    for what, sample in variants:
        if (found := called(case, sample.make(case.device))) is None:
            continue
        try:
            worst = deviation(case.subject, sample, found)
        except KitError as error:
            raise AssertionError(
                f"{what}: the operator takes it, its reference does not: {error}, for {sample}"
            ) from error
        assert worst <= 1, f"{what}: {worst.text}, for {sample}"
        compared += 1
    return compared


def _variants(sample: Sample) -> Iterator[tuple[str, Sample]]:
    at = _lists(sample)
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


def _misfits(sample: Sample) -> Iterator[tuple[str, Sample]]:
    for i in _lists(sample):
        for dtype in _OTHER_DTYPES:
            yield f"with list {i} starting in {dtype}", _first(sample, i, dtype=dtype)
        yield f"with list {i} starting with {_LONGER}", _first(sample, i, shape=_LONGER)
        longer = [*sample.args]
        longer[i] = [*longer[i], longer[i][-1]]
        yield f"with one more tensor in list {i}", replace(sample, args=tuple(longer))


def _first(sample: Sample, i: int, **changes: Any) -> Sample:
    """Returns the sample with a change of the first tensor of one list."""
    args = list(sample.args)
    first, *others = args[i]
    args[i] = [first and replace(first, layout="contiguous", **changes), *others]
    return replace(sample, args=tuple(args))


def _lists(sample: Sample) -> list[int]:
    return [i for i, value in enumerate(sample.args) if _is_list(value)]


def _is_list(value: Any) -> bool:
    some = isinstance(value, (list, tuple)) and len(value) > 0
    return some and all(isinstance(one, TensorArg) or one is None for one in value)


def _empty(arg: Any) -> Any:
    """Returns an empty tensor of as many dims, one for a number."""
    if not isinstance(arg, TensorArg):
        return arg
    return replace(arg, shape=(0, *arg.shape[1:]), layout="contiguous")
