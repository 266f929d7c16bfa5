"""Which samples a check sees: a few chosen ones, or as many as the profile says."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import Phase, given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from cuda_ops.derive.arguments import group_of
from cuda_ops.spec import OpSpec
from cuda_ops.testing.profiles import PROFILES
from cuda_ops.testing.samples import MAX_NUMEL, Sample, TensorArg
from cuda_ops.testing.subject import Subject


class EnoughError(BaseException):
    """Ends Hypothesis, which goes on after any Exception."""


#: Looked through to find a few that fit.
_TRIED = 200


def plain(sample: Sample) -> Sample:
    """Ordinary values in contiguous tensors: layouts and edges are other checks' business."""
    return sample.with_tensors(lambda arg: replace(arg, layout="contiguous"), "normal")


def ordinary(sample: Sample) -> Sample:
    """Ordinary values in any layout."""
    return sample.with_tensors(lambda arg: arg, "normal")


@dataclass(frozen=True)
class Draw:
    """What to draw for one check."""

    #: So many different samples; ``None``: as many as the profile says.
    count: int | None = None
    #: The size of each tensor with loop dims, in elements.
    numel: range = range(MAX_NUMEL + 1)
    #: Where the operator takes it; a floating dtype.
    dtype: torch.dtype | None = None
    #: With a floating tensor: for checks of gradients, where an operator takes others too.
    floating: bool = False
    adapt: Callable[[Sample], Sample] = plain
    #: These instead, where the operator's signature line is enough to make them from.
    listed: Callable[[OpSpec], list[Sample]] | None = None
    #: These too, likewise.
    beside: Callable[[OpSpec], list[Sample]] | None = None
    #: Of ``count``, so many that the check could be run on are enough; ``None``: all.
    enough: int | None = None

    def strategy(self, subject: Subject) -> SearchStrategy[Sample]:
        def retyped(arg: TensorArg) -> TensorArg:
            if self.dtype is None or not arg.dtype.is_floating_point:
                return arg
            return replace(arg, dtype=self.dtype)

        def adapted(sample: Sample) -> Sample:
            return self.adapt(sample.with_tensors(retyped))

        def fits(sample: Sample) -> bool:
            if self.floating and not any(arg.dtype.is_floating_point for arg in sample.tensors):
                return False
            sized = _with_loop_dims(subject.op, sample)
            return all(math.prod(arg.shape) in self.numel for arg in sized)

        assert subject.strategy is not None
        return subject.strategy.map(adapted).filter(fits)


def _with_loop_dims(op: OpSpec, sample: Sample) -> Sequence[TensorArg]:
    """The tensors that grow with the loop dims; all, where a line says of none that it has some."""
    if op.signature is None:
        return sample.tensors
    values = [(k, sample.args[i]) for k, i in enumerate(op.tensor_positions)]
    growing = [v for k, v in values if isinstance(v, TensorArg) and group_of(op, k).loops]
    return growing or sample.tensors


#: For a check that needs no arguments.
NOTHING = Draw(0)


def follows_line(subject: Subject) -> bool:
    """Whether arguments can be made from the signature line, which knows no dtypes and no values:
    of indices beside numbers only the operator's own samples know which are valid.
    """
    if subject.op.signature is None:
        return False
    kinds = {t.dtype.is_floating_point for s in chosen(subject, Draw(1)) for t in s.tensors}
    return len(kinds) <= 1


def chosen(subject: Subject, draw: Draw) -> list[Sample]:
    """Up to ``draw.count`` different samples, the same ones each time; the smallest first."""
    if draw.count == 0:
        return [Sample(())]
    if draw.listed is not None and follows_line(subject):
        return draw.listed(subject.op)
    found: list[Sample] = []

    def collect(sample: Sample) -> None:
        if sample not in found:
            found.append(sample)
        if len(found) == draw.count:
            raise EnoughError

    fixed = settings(PROFILES["quick"].settings(), max_examples=_TRIED, phases=[Phase.generate])
    with contextlib.suppress(EnoughError, Unsatisfiable):
        fixed(given(draw.strategy(subject))(collect))()
    if draw.beside is not None and follows_line(subject):
        found += (sample for sample in draw.beside(subject.op) if sample not in found)
    return sorted(found, key=lambda sample: sample.numel)
