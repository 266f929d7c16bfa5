"""Random operators: when the public function draws a key, and what is made of it.

What the numbers are is for the other checks: a key is an argument, so ``reference`` compares them,
and ``layouts`` and ``alignment`` find those that depend on more than the place of an element.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cuda_ops.derive.layout import is_elementwise
from cuda_ops.registry import registry
from cuda_ops.spec import OpSpec
from cuda_ops.testing.arguments import by_keyword
from cuda_ops.testing.backward import checkpointed
from cuda_ops.testing.case import Case, NotRunError, check, sums, wanting
from cuda_ops.testing.compare import results
from cuda_ops.testing.draw import Draw, ordinary
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import is_floating, same_bits

_SEED = 17


def _draws_nothing(subject: Subject, device: str) -> str:
    return "" if subject.op.draws else "it draws no random numbers"


def _some(op: OpSpec) -> list[Sample]:
    """Returns a call large enough that two draws give the same result by no chance."""
    return [shaped(op, (31, 33), core=5)]


_DRAW = Draw(1, range(256, 4097), adapt=ordinary, listed=_some)


def _public(case: Case) -> Callable[..., list[torch.Tensor]]:
    """Returns the public function, which draws the key, of arguments in the order of the schema.
    What it writes is among its results.
    """
    op = case.subject.op
    function = registry().public(op.key)
    taken = inspect.signature(function).parameters.keys() - {op.random}

    def drawing(**given: Any) -> Any:
        return function(**{name: given[name] for name in given.keys() & taken})

    return lambda *args: list(results(op, by_keyword(op, drawing), args))


def _seeded(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(_SEED)
    return function(*args)


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(same_bits, a, b))


@check("draws", None, "random numbers drawn at the wrong time", _DRAW, quick=True,
       excuse=_draws_nothing)  # fmt: skip
def draws(case: Case) -> None:
    """Checks that each call draws, and draws the same after ``torch.manual_seed``, compiled, under
    activation checkpointing, and as ``torch.vmap`` asks for by ``randomness``.
    """
    call, args = _public(case), case.arguments()
    first = _seeded(call, *args)
    second = call(*args)
    assert not _equal(first, second), "two calls give the same result"
    assert _equal(_seeded(call, *args), first), "not the same result after torch.manual_seed"
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    case.same(_seeded(compiled, *args), first, "compiled")
    assert not _equal(compiled(*args), first), "two compiled calls give the same result"
    _draws_as_vmap_asks(case, call)
    if case.subject.gradient == "declared":
        leaves = case.leaves()

        def gradients(found: list[torch.Tensor]) -> list[torch.Tensor]:
            if not (ends := sums(found)):
                raise NotRunError("no floating outputs")
            grads = torch.autograd.grad(ends, wanting(leaves), allow_unused=True)
            # allow_unused gives None, which torch's type hints leave out.
            return list(filter(torch.is_tensor, grads))

        expected = gradients(_seeded(call, *leaves))

        recomputed = checkpointed(lambda *values: tuple(call(*values)))
        actual = gradients(list(_seeded(recomputed, *leaves)))
        case.same(actual, expected, "the gradient of a checkpointed call")


def _draws_as_vmap_asks(case: Case, call: Callable[..., Any]) -> None:
    op = case.subject.op
    args = case.arguments()
    first = [k for k, value in enumerate(args) if is_floating(value)][:1]
    mapped = {*first, *(k for k in op.written if args[k] is not None)}
    if not (case.subject.vmap and first):
        return
    in_dims = tuple(0 if k in mapped else None for k in range(len(args)))
    stacked = [torch.stack([v, v]) if k in mapped else v for k, v in enumerate(args)]

    def batched(randomness: str) -> list[torch.Tensor]:
        each = torch.vmap(lambda *v: tuple(call(*v)), in_dims=in_dims, randomness=randomness)
        return list(each(*stacked))

    for randomness, alike in (("same", True), ("different", False)):
        equal = all(same_bits(out[0], out[1]) for out in batched(randomness))
        assert equal is alike, (
            f"torch.vmap with randomness={randomness!r} draws "
            f"{'the same' if equal else 'other'} numbers for each part"
        )
    try:
        batched("error")
    except RuntimeError as refusal:
        if "randomness" in str(refusal):
            return
        raise
    raise AssertionError(f"{op.qualname} draws under torch.vmap with randomness='error'")


def _not_elementwise(subject: Subject, device: str) -> str:
    if reason := _draws_nothing(subject, device):
        return reason
    op = subject.op
    if op.signature is not None and is_elementwise(op):
        return ""
    return "elements of one result may belong together where it is not elementwise"


#: Neighbors in a block of words, in a pack, in a warp and in a block of threads.
_DISTANCES = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 128, 256, 512, 1024)


def _many(op: OpSpec) -> list[Sample]:
    return [shaped(op, (257, 255))]


@check("independence", None, "random numbers that depend on each other",
       Draw(1, range(256, 4097), listed=_many), quick=True, excuse=_not_elementwise)  # fmt: skip
def independence(case: Case) -> None:
    """Checks that elements of equal value get results that do not correlate, near or far, nor under
    keys that differ in one number. Seeds are fixed: a call that passes always passes.
    """
    op = case.subject.op
    args = list(replace(case.sample, values="equal").make(case.device))
    place = op.argument_names.index(op.random)
    keys = ([1, 2], [2, 2], [1, 3], [2, 1], [1, 2 + (1 << 32)], [1 + (1 << 32), 2])
    per_key = []
    for key in keys:
        args[place] = torch.tensor(key, device=case.device)
        result = case.call(*args)[0].detach().double().flatten()
        if not bool(result.isfinite().all()) or result.std() == 0:
            raise NotRunError("all results of this sample are equal")
        per_key.append((result - result.mean()) / result.std(correction=0))
    first = per_key[0]
    found = {
        f"elements {distance} apart": (first[distance:] * first[:-distance]).mean()
        for distance in _DISTANCES
        if distance < first.numel() // 2
    }
    found |= {
        f"keys {keys[0]} and {key}": (first * other).mean()
        for key, other in zip(keys[1:], per_key[1:], strict=True)
    }
    bound = 5 / first.numel() ** 0.5  # five standard deviations
    for what, correlation in found.items():
        assert abs(correlation) < 1.1 * bound, (
            f"the results of {what} correlate: {float(correlation):.3g}, expected less than "
            f"{bound:.2g} for {first.numel()} elements"
        )


@check("replays", 10, "random numbers that a CUDA graph repeats", _DRAW, devices=("cuda",),
       excuse=_draws_nothing)  # fmt: skip
def replays(case: Case) -> None:
    """Checks that each replay of a captured call draws anew, by torch's seed."""
    call, args = _public(case), case.arguments()
    call(*args)  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*args)

    def replay() -> list[torch.Tensor]:
        graph.replay()
        torch.cuda.synchronize()
        return [out.clone() for out in captured]

    first = _seeded(replay)
    assert not _equal(first, replay()), "two replays give the same result"
    assert _equal(_seeded(replay), first), "not the same result after torch.manual_seed"
