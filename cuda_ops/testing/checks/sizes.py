"""Sizes: many of them together, since some mistakes need two that do not go into each other."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from cuda_ops.derive.arguments import bind, group_of
from cuda_ops.derive.checks import check_arguments
from cuda_ops.errors import KitError
from cuda_ops.spec import OpSpec, Range
from cuda_ops.testing.arguments import sampled_arguments
from cuda_ops.testing.case import Case, NotRunError, called, check
from cuda_ops.testing.checks.gradient_edges import compare_gradients, no_other_gradient
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.draw import Draw, chosen, follows_line
from cuda_ops.testing.samples import Sample, limited, within_limit
from cuda_ops.testing.sizes import ROWS, most_elements, resizable, resized, shaped, widest_floating
from cuda_ops.testing.subject import ITSELF, Subject

#: How many calls, how many with gradients, and elements of the largest tensor of each.
_CALLS, _GRADIENT_CALLS, _ELEMENTS = 900, 600, 1 << 12
#: How many sizes of a dim, how many of them are small, which is that of other dims where one is
#: tried, and how often all are small.
_LARGEST, _FEW, _OTHERS, _SMALL = 64, 8, 2, 0.25
#: Loop dims where they are not the same for all tensors.
_LOOP = (2, 3, 4)
#: Sizes without a range.
_SIZES = Range(1, 1 << 30)
#: Ints that are no size and have no range.
_INTS = Range(-1, 5)
#: What is said of a call that fails: a command runs the check again with what it drew first.
_AMONG_OTHERS = "\nthe command below draws all sizes again, these among them"
#: How many of an operator's own samples tell in which order its sizes must be.
_SHOWN = 30


def _without_sizes(subject: Subject, device: str) -> str:
    if subject.op.signature is None:
        return "no signature line says which sizes belong together"
    return "" if resizable(subject.op) else "it has no sizes"


def _no_other_result(subject: Subject, device: str) -> str:
    if subject.is_its_own_reference(device):
        return ITSELF
    return _without_sizes(subject, device)


def _no_other_gradient(subject: Subject, device: str) -> str:
    return no_other_gradient(subject, device) or _without_sizes(subject, device)


@check("sizes", None, "wrong for some sizes", Draw(1, range(1, 4097)), quick=True,
       excuse=_no_other_result)  # fmt: skip
def sizes(case: Case) -> None:
    """Compares hundreds of small contiguous calls with the reference: each size from 1 to 64, many
    of them together at random, tensors broadcast over any of three dims, and bools and small ints
    with them. The smallest comes first.
    """
    compared = 0
    for sample in _drawn(case, _CALLS):
        if (found := called(case, sample.make(case.device))) is None:
            continue
        try:
            worst = deviation(case.subject, sample, found)
        except KitError:  # the reference refuses an int
            continue
        assert worst <= 1, f"{worst.text}, for {sample}{_AMONG_OTHERS}"
        compared += 1
    if not compared:
        raise NotRunError("no drawn size can be called")


@check("gradient_sizes", None, "a gradient is wrong for some sizes",
       Draw(1, range(1, 4097), torch.float64, or_widest=True, floating=True), quick=True,
       excuse=_no_other_gradient)  # fmt: skip
def gradient_sizes(case: Case) -> None:
    """Compares gradients with those that torch derives of the reference, as ``sizes`` does results,
    in float64.
    """
    compared = 0
    for sample in _drawn(case, _GRADIENT_CALLS):
        if called(case, sample.make(case.device)) is None:
            continue
        with contextlib.suppress(NotRunError, KitError):
            _compare_gradients(replace(case, sample=sample))
            compared += 1
    if not compared:
        raise NotRunError("torch derives no gradient of the reference for any drawn size")


def _compare_gradients(case: Case) -> None:
    """Compares with the reference's gradients; where those differ, there may be a kink, and the
    gradients around it count too.
    """
    try:
        compare_gradients(case, count=0)
    except AssertionError:
        try:
            compare_gradients(case)
        except AssertionError as failure:
            raise AssertionError(f"{failure}, for {case.sample}{_AMONG_OTHERS}") from failure


def _drawn(case: Case, count: int) -> list[Sample]:
    """Returns calls of each size of each dim and of sizes drawn at random, the smallest first."""
    return sorted(_made(case, count), key=lambda sample: sample.numel)


def _made(case: Case, count: int) -> Iterator[Sample]:
    op, drawn = case.subject.op, random.Random(0)
    by_line = follows_line(case.subject)
    if by_line:
        yield from _broadcasts(op, drawn, count // 9)
    ordered = [] if by_line else _ordered(case.subject)
    for seed, vector in enumerate(_vectors(op, drawn, count)):
        if any(vector[smaller] > vector[larger] for smaller, larger in ordered):
            continue
        sample = _of_line(op, vector, drawn) if by_line else _of_own(op, case.sample, vector)
        yield replace(sample, seed=seed)


def _vectors(op: OpSpec, drawn: random.Random, count: int) -> Iterator[dict[str, int]]:
    """Yields sizes by dim: each of one dim, then several at random, a quarter of them all small."""
    dims = resizable(op)
    spans = {dim: _span(op.ranges.get(dim, _SIZES)) for dim in dims}
    others = {dim: min(span[0] + _OTHERS, span[-1]) for dim, span in spans.items()}
    single = [others | {dim: size} for dim in dims for size in spans[dim]]
    yield from single[:: -(-3 * len(single) // count)]
    for _ in range(count * 2 // 3 if len(dims) > 1 else 0):
        few = drawn.random() < _SMALL
        vector = {dim: drawn.choice(span[:_FEW] if few else span) for dim, span in spans.items()}
        while _elements(op, vector) > _ELEMENTS and (large := _reducible(vector, spans)):
            dim = drawn.choice(large)
            vector[dim] = drawn.choice(spans[dim][:_FEW])
        if _elements(op, vector) <= _ELEMENTS:
            yield vector


def _broadcasts(op: OpSpec, drawn: random.Random, count: int) -> Iterator[Sample]:
    """Yields calls whose tensors have different loop dims: any of three may be 1, and those in
    front may be missing.
    """
    whole = shaped(op, _LOOP, core=_OTHERS, dtype=widest_floating(op))
    growing = [i for k, i in enumerate(op.tensor_positions) if group_of(op, k).loops]
    free = [i for i in growing if i not in op.written]
    for seed in range(count if len(growing) > 1 else 0):
        args = list(whole.args)
        for i in free:
            core = args[i].shape[len(_LOOP) :]
            loop = [drawn.choice((1, size)) for size in _LOOP[drawn.choice((0, 0, 1, 2, 3)) :]]
            args[i] = replace(args[i], shape=(*loop, *core))
        yield replace(whole, args=tuple(args), seed=seed)


def _span(allowed: Range) -> range:
    least = max(allowed.least, min(allowed.most, 1))
    return range(least, min(allowed.most, least + _LARGEST - 1) + 1)


def _reducible(vector: dict[str, int], spans: dict[str, range]) -> list[str]:
    return [dim for dim, size in vector.items() if size not in spans[dim][:_FEW]]


def _elements(op: OpSpec, vector: dict[str, int]) -> int:
    return most_elements(op, (vector[ROWS],) if ROWS in vector else (), vector)


def _ordered(subject: Subject) -> list[tuple[str, str]]:
    """Returns the pairs of dims of which none of an operator's own samples has the first larger:
    it may need that, as one that chooses k of n does.
    """
    op = subject.op
    shown = chosen(subject, Draw(_SHOWN, range(1, 4097)))
    bound = [check_arguments(op, bind(op, sample.make("meta"), {})) for sample in shown]
    pairs = itertools.permutations(op.drawn_dims, 2)
    return [(a, b) for a, b in pairs if all(one.get(a, 0) <= one.get(b, 0) for one in bound)]


def _of_line(op: OpSpec, vector: dict[str, int], drawn: random.Random) -> Sample:
    """Returns a call of these sizes, with bools, words, and ints that are no sizes, at random."""
    core = {dim: size for dim, size in vector.items() if dim != ROWS}
    loop = (vector[ROWS],) if ROWS in vector else ()
    sample = shaped(op, loop, core=core, dtype=widest_floating(op))
    args = list(sample.args)
    for i, argument in enumerate(sampled_arguments(op)):
        kind, name = str(argument.real_type), argument.name
        if kind == "bool":
            args[i] = drawn.random() < 0.5
        elif name in op.choices:
            args[i] = drawn.choice(op.choices[name])
        elif kind == "int" and name not in core:
            allowed = op.ranges.get(name, _INTS)
            number = drawn.randint(allowed.least, min(allowed.most, allowed.least + 6))
            args[i] = within_limit(op, name, number, limited(op, core))
    return replace(sample, args=tuple(args))


def _of_own(op: OpSpec, sample: Sample, vector: dict[str, int]) -> Sample:
    """Returns the operator's own sample with these sizes, as far as it takes them."""
    for dim, size in vector.items():
        sample = resized(op, sample, dim, size) or sample
    return sample
