"""Class 9: the wrong device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.draw import Draw


@check("devices", 9, "wrong device", Draw(2, range(1, 4097)), devices=("cuda",))
def devices(case: Case) -> None:
    """Checks that outputs are on the inputs' device, that mixed devices are refused, and that
    device 1 works while 0 is current.
    """
    args = case.arguments()
    expected = case.call(*args)
    named = case.subject.op.device_position
    home = expected[0].device if named is not None else _devices(args)[0]
    if named is not None:
        assert home.type == "cuda", f"outputs are on {home}, {args[named]} was asked for"
    for k, output in enumerate(expected):
        assert output.device == home, f"output {k} is on {output.device}, the inputs on {home}"
    at = [i for i, v in enumerate(args) if isinstance(v, torch.Tensor) and v.dim()]
    for i in at if len(at) > 1 else []:
        mixed = [v.cpu() if k == i else v for k, v in enumerate(args)]
        name = case.subject.op.argument_names[i]
        try:
            case.call(*mixed)
            torch.cuda.synchronize()
        except RuntimeError as refusal:
            if "CUDA error" in str(refusal):
                raise
        else:
            raise AssertionError(f"'{name}' on the CPU and the rest on {home} is not refused")
    if torch.cuda.device_count() > 1:
        other = torch.device("cuda:1")
        with torch.cuda.device(0):
            actual = case.call(*moved(args, other))
            torch.cuda.synchronize("cuda:1")
        for k, output in enumerate(actual):
            assert output.device.index == 1, f"inputs on cuda:1, output {k} on {output.device}"
        case.same(actual, expected, "on cuda:1 while cuda:0 is current")
    elif len(at) < 2:
        raise NotRunError("one tensor and one GPU: only the device of the outputs was looked at")


def moved(args: Sequence[Any], other: torch.device) -> list[Any]:
    """Returns the arguments on another device."""
    given = [v.to(other) if isinstance(v, torch.Tensor) else v for v in args]
    return [other if isinstance(v, torch.device) else v for v in given]


def _devices(args: Sequence[Any]) -> list[torch.device]:
    return [value.device for value in args if isinstance(value, torch.Tensor)]
