"""Class 13: what torch was told about an operator, and what the operator does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.testing.case import Case, check
from cuda_ops.testing.compare import described, same_bits, tensors
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample


def _as_drawn(sample: Sample) -> Sample:
    return replace(sample)


@check("registration", 13, "fake, schema or mutation wrong", Draw(adapt=_as_drawn), quick=True)
def registration(case: Case) -> None:
    """Inputs keep their bits, outputs share no memory with them, and the fake foretells outputs."""
    args, names = case.arguments(), case.subject.op.argument_names
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
    real = tensors(case.call(*args))
    declared = case.subject.op.parsed.arguments
    inputs = []
    for argument, name, old, new in zip(declared, names, before, args, strict=True):
        if isinstance(new, torch.Tensor) and argument.alias_info is None:
            inputs.append((name, new))
            assert same_bits(old, new), f"argument '{name}' was changed; the schema does not say so"
    memory = {new.untyped_storage().data_ptr(): f"argument '{name}'" for name, new in inputs}
    for k, output in enumerate(real):
        place = output.untyped_storage().data_ptr()
        assert not output.numel() or place not in memory, (
            f"output {k} is memory of {memory[place]}; the schema does not say so"
        )
        memory[place] = f"output {k}"
    with FakeTensorMode() as mode:
        fakes = [
            mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args
        ]
        foretold = [described(output) for output in tensors(case.call(*fakes))]
    actual = [described(output) for output in real]
    assert foretold == actual, f"the fake says {foretold}, the real output is {actual}"
