import torch
from hypothesis import strategies as st

from cuda_ops.hookspecs import hookimpl
from cuda_ops.testing import Sample, TensorArg


@hookimpl
def cuda_ops_reference(op):
    return lambda xs: torch.stack([x.sum() for x in xs])


@hookimpl
def cuda_ops_fake(op):
    return lambda xs: xs[0].new_empty(len(xs), dtype=torch.float64)


@hookimpl
def cuda_ops_samples(op):
    sizes = st.lists(st.integers(1, 9), min_size=2, max_size=5)
    return st.builds(lambda s: Sample(([TensorArg((n,), torch.float64) for n in s],)), sizes)
