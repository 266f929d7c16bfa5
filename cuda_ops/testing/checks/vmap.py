"""``torch.vmap`` against a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from cuda_ops.testing.case import NO_TENSOR, Case, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import PAIRS


def _no_rule(subject: Subject, device: str) -> str:
    if subject.vmap:
        return ""
    if subject.op.device_position is not None:
        return NO_TENSOR
    whose = " of the operators it calls" if subject.op.is_composite else ""
    return f"no batching rule: implement cuda_ops_vmap{whose}"


@check("vmap", None, "the batching rule is wrong", Draw(4, range(1, 513)), quick=True,
       excuse=_no_rule)  # fmt: skip
def vmap(case: Case) -> None:
    """Checks the mapped dim first, last, on some tensors only, and without elements."""
    sample = case.sample
    # copies[i] are the arguments of the i-th call
    copies = [replace(sample, seed=sample.seed + i).make(case.device) for i in range(3)]

    def mapped(in_dims: tuple[Any, ...]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            found = case.operator(*values)
            return () if found is None else found  # torch.vmap returns tensors alone

        return torch.vmap(call, in_dims=in_dims)

    for in_dims in _mappings(sample):
        if any(in_dims[k] is None for k in case.subject.op.written if k < len(in_dims)):
            continue  # all parts would be written to one tensor
        args = [
            copies[0][k]
            if dim is None
            else _stack([copy[k] for copy in copies], 0 if dim == 0 else -1)
            for k, dim in enumerate(in_dims)
        ]
        looped = [
            case.call(*(copies[0 if dim is None else i][k] for k, dim in enumerate(in_dims)))
            for i in range(3)
        ]
        batched = case.results(mapped(in_dims), args)
        # What was written lies where it was mapped.
        written = [in_dims[k] for k in case.subject.op.written if args[k] is not None]
        at = [*[0] * (len(looped[0]) - len(written)), *(0 if dim == 0 else -1 for dim in written)]
        parts = list(zip(*looped, strict=True))
        expected = list(map(_stack, parts, at))
        case.same(batched, expected, f"vmap with in_dims={in_dims}")
        empty = [
            arg if dim is None else arg.narrow(dim, 0, 0)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        batched = case.results(mapped(in_dims), empty)
        expected = [part.narrow(dim, 0, 0) for part, dim in zip(expected, at, strict=True)]
        case.same(batched, expected, f"vmap with in_dims={in_dims} of no elements")


def _stack(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    if tensors[0].dtype != PAIRS:
        return torch.stack(list(tensors), dim)
    return torch.stack([t.view(torch.uint8) for t in tensors], dim).view(PAIRS)  # as torch cannot


def _mappings(sample: Sample) -> list[tuple[Any, ...]]:
    """Returns which dim of which argument to map: all first, all last, then each tensor alone."""
    tensors = [k for k, arg in enumerate(sample.args) if isinstance(arg, TensorArg)]
    positions = range(len(sample.args))
    everything = [tuple(dim if k in tensors else None for k in positions) for dim in (0, -1)]
    alone = [tuple(0 if k == mapped else None for k in positions) for mapped in tensors]
    return everything + (alone if len(tensors) > 1 else [])
