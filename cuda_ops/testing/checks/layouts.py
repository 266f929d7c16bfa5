"""Class 4: a forward that assumes contiguous inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample, TensorArg


def _strided(sample: Sample) -> Sample:
    """Returns the sample with ordinary values and strided tensors. An offset alone is for
    ``alignment`` to check; a sample without other layouts gets strides for every tensor.
    """
    dense = {arg.layout for arg in sample.tensors} <= {"contiguous", "offset"}

    def adapted(arg: TensorArg) -> TensorArg:
        if not dense and arg.layout != "offset":
            return arg
        return replace(arg, layout="transposed" if len(arg.shape) > 1 else "stepped")

    return sample.with_tensors(adapted, "normal")


@check("layouts", 4, "the forward assumes contiguous inputs", Draw(adapt=_strided), quick=True)
def layouts(case: Case) -> None:
    """Checks that equal values in another layout give an equal result, or a clear error."""
    args = case.arguments()
    dense = [v.contiguous().clone() if isinstance(v, torch.Tensor) else v for v in args]
    expected = case.call(*dense)
    try:
        actual = case.call(*args)
    except (RuntimeError, ValueError) as refusal:
        if "CUDA error" in str(refusal):
            raise
        raise NotRunError(f"the operator refuses some layouts: {refusal}") from refusal
    used = ", ".join(arg.layout for arg in case.sample.tensors)
    case.same(actual, expected, f"not the result of contiguous inputs ({used})")
