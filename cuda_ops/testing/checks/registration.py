"""Class 13: what torch was told about an operator, against what the operator does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.arguments import each
from cuda_ops.testing.case import Case, called, check
from cuda_ops.testing.compare import check_fake
from cuda_ops.testing.draw import Draw, follows_line, ordinary
from cuda_ops.testing.samples import Layout, Sample, TensorArg, layouts_of
from cuda_ops.testing.sizes import example_scalar, shaped
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import same_bits, tensors

#: The title of every check of this class.
TITLE = "fake, schema or mutation wrong"
#: An operator may leave its arguments as they are for some values, such as a mask without ones.
_VALUES_TRIED = 4


def _with_ordinary_numbers(op: OpSpec, sample: Sample) -> Sample:
    """Returns the sample with the default, or 0.5, of each float: with a weight of 0 an operator
    may leave alone what it writes.
    """
    args = [
        example_scalar(op, argument) if isinstance(value, float) else value
        for argument, value in zip(op.parsed.arguments, sample.args, strict=False)
    ]
    return replace(sample, args=tuple(args))


def _as_drawn(sample: Sample) -> Sample:
    return replace(sample)


@check("mutation", 13, TITLE, Draw(), quick=True)
def mutation(case: Case) -> None:
    """Checks that inputs keep their bits and outputs share no memory with them or each other."""
    args = case.arguments()
    before = [each(lambda v: v.clone() if torch.is_tensor(v) else v, value) for value in args]
    real = case.call(*args)
    memory = {}
    # Arguments that the sample leaves out keep their defaults.
    for argument, old, new in zip(case.subject.op.parsed.arguments, before, args, strict=False):
        if argument.alias_info is not None:
            continue
        for was, now in zip(tensors([old]), tensors([new]), strict=True):
            what = f"argument '{argument.name}'"
            assert same_bits(was, now), f"{what} was changed, and the schema does not say so"
            memory[now.untyped_storage().data_ptr()] = what
    for k, output in enumerate(real):
        place = output.untyped_storage().data_ptr()
        assert not output.numel() or place not in memory, (
            f"output {k} shares memory with {memory[place]}, and the schema does not say so"
        )
        memory[place] = f"output {k}"


#: A dense layout and one with gaps, of which a fake may keep the strides or not.
_STRIDED: tuple[Layout, ...] = ("transposed", "stepped")


@check("registration", 13, TITLE, Draw(adapt=_as_drawn), quick=True)
def registration(case: Case) -> None:
    """Checks that the fake foretells shape, strides, dtype and device of each output, for samples
    that are contiguous in other layouts too, and for an operator's own ones with sizes that are one
    larger: those of a plugin may all divide evenly.
    """
    args = case.arguments()
    check_fake(case.subject.op, case.operator, args, case.call(*args))
    for sample in () if case.subject.by_line else _longer(case.sample):
        args = sample.make(case.device)
        if (found := called(case, args)) is not None:
            check_fake(case.subject.op, case.operator, args, found)
    for layout in _STRIDED if all(a.layout == "contiguous" for a in case.sample.tensors) else ():
        args = _laid_out(case.sample, layout).make(case.device)
        if (found := called(case, args)) is not None:
            check_fake(case.subject.op, case.operator, args, found)


def _longer(sample: Sample) -> list[Sample]:
    """Returns the sample with its largest size up to three larger, wherever a tensor has it, and so
    with the next one: what must be equal stays so.
    """
    if any(arg.distinct for arg in sample.tensors):  # there are no more places to be at
        return []

    def longer(arg: TensorArg, size: int, by: int) -> TensorArg:
        return replace(arg, shape=tuple(n + by * (n == size) for n in arg.shape))

    sizes = sorted({n for arg in sample.tensors for n in arg.shape if n > 1})
    return [
        sample.with_tensors(partial(longer, size=size, by=by))
        for size in sizes[-2:]
        for by in (1, 2, 3)
    ]


def _writes_nothing(subject: Subject, device: str) -> str:
    return "" if subject.op.written else "it writes no argument"


@check("written", 13, TITLE, Draw(1, range(1, 513), adapt=ordinary), quick=True,
       excuse=_writes_nothing)  # fmt: skip
def written(case: Case) -> None:
    """Checks that each argument which the schema calls written changes for some values at least."""
    op = case.subject.op
    given = [i for i, arg in enumerate(case.sample.args) if i in op.written and arg is not None]
    changed, empty = set(), set[int]()
    samples = [case.sample, _with_ordinary_numbers(op, case.sample)]
    if follows_line(case.subject):  # one that puts rows in another order changes no single number
        samples.append(shaped(op, (3,), core=5))
    for sample in samples:
        for seed in range(_VALUES_TRIED):
            args = replace(sample, seed=sample.seed + seed).make(case.device)
            if (results := called(case, args)) is None:
                if sample is case.sample:
                    case.call(*args)  # raises what refused it
                break  # other numbers may be wrong for it
            after = results[-len(given) :] if given else ()
            pairs = zip(given, after, strict=True)
            changed |= {i for i, new in pairs if not same_bits(args[i], new)}
            empty |= {i for i in given if not args[i].numel()}
    for i in given:
        name = op.argument_names[i]
        assert i in changed | empty, f"argument '{name}' never changes, and its type has (a!)"


#: Layouts that leave memory between elements, before them or behind them.
_WITH_GAPS: tuple[Layout, ...] = ("sliced", "padded", "stepped", "offset")


@check("gaps", 13, TITLE, Draw(4, range(12, 513), adapt=ordinary), quick=True)
def gaps(case: Case) -> None:
    """Checks that what lies between, before and behind elements of arguments keeps its bits, and
    so do strided arguments that are not written.
    """
    op = case.subject.op
    for layout in _WITH_GAPS:
        args = _laid_out(case.sample, layout).make(case.device)
        values = [value for value in args if isinstance(value, torch.Tensor)]
        before = [_memory(value).clone() for value in values]
        if called(case, args) is None:
            continue
        case.operator(*args)  # a call of the kit gives what is written its values back
        named = zip(op.argument_names, args, strict=False)
        names = [name for name, value in named if isinstance(value, torch.Tensor)]
        written = {op.argument_names[i] for i in op.written}
        for name, value, old in zip(names, values, before, strict=True):
            now = _memory(value).clone()
            if name in written:
                _within(now, value).copy_(_within(old, value))
            assert same_bits(old, now), f"memory of '{name}' ({layout}) beside its elements changed"


def _laid_out(sample: Sample, layout: Layout) -> Sample:
    """Returns the sample with a layout for each tensor that may have it."""

    def laid_out(arg: TensorArg) -> TensorArg:
        return replace(arg, layout=layout if layout in layouts_of(arg.shape) else arg.layout)

    return sample.with_tensors(laid_out)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all that a tensor's storage holds, as one dim."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def _within(memory: torch.Tensor, tensor: torch.Tensor) -> Any:
    """Returns the elements of a tensor in a copy of its memory."""
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
