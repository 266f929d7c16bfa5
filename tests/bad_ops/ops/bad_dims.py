import torch
from hypothesis import strategies as st

from cuda_ops.hookspecs import hookimpl
from cuda_ops.testing import Sample, TensorArg


@hookimpl
def cuda_ops_reference(op):
    return lambda x, dims: torch.flip(x, tuple(dims))


@hookimpl
def cuda_ops_fake(op):
    return lambda x, dims: x.new_empty(x.shape)


@hookimpl
def cuda_ops_samples(op):
    shapes = st.tuples(*[st.integers(1, 5)] * 3)
    dims = st.sampled_from(([0], [-1], [0, 1], [1, 2], [-2, -1]))
    dtypes = st.sampled_from(op.dtypes)
    return st.builds(lambda s, t, d: Sample((TensorArg(s, t), d)), shapes, dtypes, dims)
