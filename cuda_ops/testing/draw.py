"""Chooses the samples that a check sees: a few fixed ones, or as many as the profile says."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from hypothesis import Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from cuda_ops.derive.arguments import group_of
from cuda_ops.spec import OpSpec
from cuda_ops.testing.profiles import PROFILES
from cuda_ops.testing.samples import LEAST_DIMS, MAX_NUMEL, Sample, TensorArg, strategy
from cuda_ops.testing.sizes import each_layout, widest_of_all
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.values import Values

#: How many samples are drawn at first, and how many more each time that too few fit a check.
_ROUNDS = (200, 400, 800)

#: How many samples that fit are enough to choose from.
_ENOUGH = 50


def plain(sample: Sample) -> Sample:
    """Returns the sample with ordinary values in contiguous tensors; other checks see the rest."""
    return sample.with_tensors(lambda arg: replace(arg, layout="contiguous"), "normal")


def ordinary(sample: Sample) -> Sample:
    """Returns the sample with ordinary values, in its own layouts."""
    return sample.with_tensors(lambda arg: arg, "normal")


@dataclass(frozen=True)
class Draw:
    """What to draw for one check."""

    #: How many different samples; ``None`` for as many as the profile says.
    count: int | None = None
    #: The size of each tensor with loop dims, in elements.
    numel: range = range(MAX_NUMEL + 1)
    #: The dtype of all floating tensors; ``None`` for any that the operator takes.
    dtype: torch.dtype | None = None
    #: Whether the widest that all tensors may have will do where they may not have that one.
    or_widest: bool = False
    #: Whether a sample must have a floating tensor, as checks of gradients need.
    floating: bool = False
    adapt: Callable[[Sample], Sample] = plain
    #: Samples to use instead, if the signature line is enough to make them.
    listed: Callable[[OpSpec], list[Sample]] | None = None
    #: Samples to use instead of others, made from the operator's smallest that are not empty.
    grown: Callable[[OpSpec, Sample], list[Sample]] | None = None
    #: From how many of the smallest they are made.
    grown_from: int = 1
    #: Samples to use as well, if the signature line is enough to make them.
    beside: Callable[[OpSpec], list[Sample]] | None = None
    #: Whether to use what the operator names for compute-sanitizer too: calls of larger kernels.
    kernels: bool = False
    #: How many of ``count`` must pass, the rest being spares; ``None`` for all.
    enough: int | None = None
    #: Whether to add samples until each bool, word and ``None`` that is drawn for an argument has
    #: come up, and a few of its ints.
    choices: bool = False
    #: Whether to draw others where none of those listed can be judged.
    or_drawn: bool = False

    def strategy(
        self, subject: Subject, left_out: Callable[[Sample], None]
    ) -> SearchStrategy[Sample]:
        """Returns the samples that fit; calls ``left_out`` with each that is too large."""

        def fits(sample: Sample) -> bool:
            if max(_sizes(subject, sample), default=0) >= self.numel.stop:
                left_out(sample)
            return self._fits(subject, sample)

        assert subject.strategy is not None
        return subject.strategy.map(partial(self._adapted, subject.op)).filter(fits)

    def fitting(self, subject: Subject, drawn: Iterable[Sample]) -> Iterator[Sample]:
        """Yields those of the drawn samples that fit."""
        for sample in map(partial(self._adapted, subject.op), drawn):
            if self._fits(subject, sample):
                yield sample

    def _adapted(self, op: OpSpec, sample: Sample) -> Sample:
        dtype = (self.or_widest and widest_of_all(op)) or self.dtype

        def retyped(arg: TensorArg) -> TensorArg:
            if dtype is None or not arg.dtype.is_floating_point:
                return arg
            return replace(arg, dtype=dtype)

        return self.adapt(sample.with_tensors(retyped))

    def _fits(self, subject: Subject, sample: Sample) -> bool:
        if self.floating and not any(arg.dtype.is_floating_point for arg in sample.tensors):
            return False
        return all(size in self.numel for size in _sizes(subject, sample))


def _sizes(subject: Subject, sample: Sample) -> list[int]:
    return [math.prod(arg.shape) for arg in _with_loop_dims(subject.op, sample)]


def _with_loop_dims(op: OpSpec, sample: Sample) -> Sequence[TensorArg]:
    """Returns the tensors that have loop dims; all tensors if the signature line gives none any."""
    if op.signature is None:
        return sample.tensors
    given = dict(enumerate(sample.args))  # optional ones at the end may be left out
    values = [(k, given.get(i)) for k, i in enumerate(op.tensor_positions)]
    growing = [v for k, v in values if isinstance(v, TensorArg) and group_of(op, k).loops]
    return growing or sample.tensors


#: For a check that needs no arguments.
NOTHING = Draw(0)


def follows_line(subject: Subject) -> bool:
    """Tells whether the signature line is enough to make arguments. Where the operator has samples
    of its own, there may be indices beside numbers, or a dtype that is required, and only those
    know which are valid.
    """
    op = subject.op
    if subject.by_line:
        return True
    if strategy(op) is None:
        return False
    kinds = {
        arg.dtype.is_floating_point
        for sample in chosen(subject, Draw(1))
        for name, arg in zip(op.argument_names, sample.args, strict=False)
        if isinstance(arg, TensorArg) and name != op.random  # any numbers are a key
    }
    return len(kinds) <= 1


#: One thing that a sample shows: where in its arguments, and what.
Trait = tuple[object, ...]


def _traits(sample: Sample) -> tuple[set[Trait], set[Trait]]:
    """Returns what a sample shows an operator: dtypes, layouts, ranks, values and missing ones; and
    layouts by rank, which are many.
    """
    traits: set[Trait] = {("values", sample.values)}
    pairs: set[Trait] = set()
    for i, arg in enumerate(sample.args):
        if isinstance(arg, TensorArg):
            traits |= {(i, arg.dtype), (i, len(arg.shape))}
            # No stride of an empty tensor shows anything, nor does that of a dim of size 1.
            wide = sum(size > 1 for size in arg.shape)
            shows = wide >= min(2, LEAST_DIMS.get(arg.layout, 0))
            layout = arg.layout if shows else "contiguous"
            if 0 in arg.shape:
                traits.add((i, "empty"))
            else:
                traits.add((i, layout))
                pairs.add((i, layout, wide))
        elif arg is None or isinstance(arg, bool):
            traits.add((i, arg))
    return traits, pairs


def covering(subject: Subject, draw: Draw, count: int) -> list[Sample]:
    """Returns up to ``count`` different samples, always the same, that show together each dtype,
    each layout, then each layout with each rank, and what else the first drawn ones do.
    """
    pool = _pool(subject, draw)
    if follows_line(subject):
        # An operator's own samples may leave out values that mean nothing to it.
        kinds = sorted({sample.values for sample in pool})
        others = itertools.cycle(kinds)
        for sample in draw.fitting(subject, each_layout(subject.op)):
            if sample.values not in kinds:
                sample = replace(sample, values=next(others))
            pool += [] if sample in pool else [sample]
    shown = [_traits(sample) for sample in pool]
    seen: set[Trait] = set()
    found: list[Sample] = []
    while len(found) < count:
        # The smallest of those that show most.
        new = [(len(traits - seen), len(pairs - seen)) for traits, pairs in shown]
        best = max(range(len(pool)), key=lambda k: (new[k], -k), default=None)
        if best is None or new[best] == (0, 0):
            break
        seen = seen.union(*shown[best])
        found.append(pool[best])
    return found


def _pool(subject: Subject, draw: Draw) -> list[Sample]:
    """Returns what an operator's own strategy draws first, a few hundred samples at most."""
    return chosen(subject, replace(draw, count=None, listed=None, beside=None))


#: Values for single tensors, and those of all tensors that they belong to.
_BELONGS: dict[Values, Values] = {
    "infinite": "special", "negative_infinite": "special", "all_infinite": "special",
    "all_negative_infinite": "special", "largest": "large", "smallest": "tiny",
}  # fmt: skip


def besides(subject: Subject, draw: Draw) -> list[Sample]:
    """Returns the samples to use as well. An operator's own ones may leave out values that mean
    nothing to it, such as infinities; then these do too.
    """
    if draw.beside is None or not follows_line(subject):
        return []
    found = [(sample, _belongs(sample)) for sample in draw.beside(subject.op)]
    if any(wanted for _, wanted in found):
        drawn = {sample.values for sample in _pool(subject, draw)}
        found = [(sample, wanted) for sample, wanted in found if wanted <= drawn]
    return [sample for sample, _ in found]


def _belongs(sample: Sample) -> set[Values]:
    values = (arg.values for arg in sample.tensors)
    return {_BELONGS[one] for one in values if one in _BELONGS}


def chosen(subject: Subject, draw: Draw) -> list[Sample]:
    """Returns up to ``draw.count`` different samples, always the same, the smallest first.

    They are chosen once, since checks on a CPU and on a GPU, and several checks, ask for the same.
    """
    if draw not in subject.drawn:
        subject.drawn[draw] = tuple(_choose(subject, draw))
    return list(subject.drawn[draw])


def _choose(subject: Subject, draw: Draw) -> list[Sample]:
    if draw.count == 0:
        return [Sample(())]
    if draw.listed is not None and follows_line(subject):
        return draw.listed(subject.op)
    found: list[Sample] = []
    if draw.grown is not None:
        small = chosen(subject, Draw(draw.grown_from, range(1, MAX_NUMEL + 1)))
        found = [made for sample in small for made in draw.grown(subject.op, sample)]
    if draw.kernels:
        fitting = (
            s for s in subject.kernel_samples if max(_sizes(subject, s), default=0) in draw.numel
        )
        found += list(islice(fitting, draw.count))
    if draw.grown is not None and found:
        return found
    if draw.count is not None and len(found) >= draw.count:
        return found

    _look_through(subject, draw, found)
    if draw.choices:
        _add_choices(subject, draw, found)
    found += (sample for sample in besides(subject, draw) if sample not in found)
    return sorted(found, key=lambda sample: sample.numel)


def _look_through(subject: Subject, draw: Draw, found: list[Sample]) -> None:
    """Adds drawn samples that fit, until there are ``draw.count`` or, without one, enough."""
    # Where each tensor has one element, a sum of the wrong ones is right too: these come last. To
    # those of a line, `beside` adds larger ones.
    for larger in (True, False) if subject.op.signature is None else (False,):
        for drawn in _rounds(subject):
            for sample in draw.fitting(subject, drawn):
                if len(found) == draw.count:
                    return
                small = sample.numel <= len(sample.tensors)
                if not (larger and small) and sample not in found:
                    found.append(sample)
            if len(found) >= (_ENOUGH if draw.count is None else draw.count):
                return


#: How many ints of one argument count.
_INTS = 3


def _add_choices(subject: Subject, draw: Draw, found: list[Sample]) -> None:
    """Adds drawn samples that fit and have something new among their arguments."""
    seen: set[tuple[int, Any]] = set()

    def new(sample: Sample) -> set[tuple[int, Any]]:
        shown: set[tuple[int, Any]] = set()
        for i, value in enumerate(sample.args):
            if value is None or isinstance(value, (bool, str)):
                shown.add((i, value))
            elif isinstance(value, TensorArg):
                shown.add((i, "a tensor"))
            elif isinstance(value, int) and sum(at == i for at, _ in seen) < _INTS:
                shown.add((i, value))
        return shown - seen

    for sample in found:
        seen |= new(sample)
    for sample in draw.fitting(subject, next(_rounds(subject))):
        if added := new(sample):
            seen |= added
            found.append(sample)


def _rounds(subject: Subject) -> Iterator[list[Sample]]:
    """Yields what the subject's strategy draws, always the same, and draws no more than is used.

    All checks look through the same samples: to draw them takes longer than most checks of one.
    """
    for i, count in enumerate(_ROUNDS):
        if i == len(subject.rounds):
            subject.rounds.append(_round(subject, i, count))
        yield subject.rounds[i]


def _round(subject: Subject, number: int, count: int) -> list[Sample]:
    drawn: list[Sample] = []

    def collect(sample: Sample) -> None:
        drawn.append(sample)

    assert subject.strategy is not None
    fixed = settings(PROFILES["quick"].settings(), max_examples=count, phases=[Phase.generate])
    with contextlib.suppress(Unsatisfiable):
        seed(number)(fixed(given(subject.strategy)(collect)))()
    return drawn
