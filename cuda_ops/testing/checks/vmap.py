"""``torch.vmap`` against a loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import same
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.subject import Subject


def _no_rule(subject: Subject, device: str) -> str:
    if subject.op.written:
        return "it changes its arguments, which a loop would change again and again"
    if subject.vmap:
        return ""
    whose = " of the operators it calls" if subject.op.is_composite else ""
    return f"no batching rule: implement cuda_ops_vmap{whose}"


@check("vmap", None, "the batching rule is wrong", Draw(4, range(1, 513)), quick=True,
       excuse=_no_rule)  # fmt: skip
def vmap(case: Case) -> None:
    """Checks the mapped dim first, last, on some tensors only, and without elements."""
    sample = case.sample
    # copies[i] are the arguments of the i-th call
    copies = [replace(sample, seed=sample.seed + i).make(case.device) for i in range(3)]
    for in_dims in _mappings(sample):
        args = [
            copies[0][k]
            if dim is None
            else torch.stack([copy[k] for copy in copies], 0 if dim == 0 else -1)
            for k, dim in enumerate(in_dims)
        ]
        looped = [
            case.call(*(copies[0 if dim is None else i][k] for k, dim in enumerate(in_dims)))
            for i in range(3)
        ]
        batched = case.results(torch.vmap(case.operator, in_dims=in_dims), args)
        expected = [torch.stack(parts) for parts in zip(*looped, strict=True)]
        same(batched, expected, f"vmap with in_dims={in_dims}", case.slack)
        empty = [
            arg if dim is None else arg.narrow(dim, 0, 0)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        batched = case.results(torch.vmap(case.operator, in_dims=in_dims), empty)
        expected = [part[:0] for part in expected]
        same(batched, expected, f"vmap with in_dims={in_dims} of no elements", case.slack)


def _mappings(sample: Sample) -> list[tuple[Any, ...]]:
    """Returns which dim of which argument to map: all first, all last, then each tensor alone."""
    tensors = [k for k, arg in enumerate(sample.args) if isinstance(arg, TensorArg)]
    positions = range(len(sample.args))
    everything = [tuple(dim if k in tensors else None for k in positions) for dim in (0, -1)]
    alone = [tuple(0 if k == mapped else None for k in positions) for mapped in tensors]
    return everything + (alone if len(tensors) > 1 else [])
