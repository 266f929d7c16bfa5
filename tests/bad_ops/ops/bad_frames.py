from hypothesis import strategies as st

from cuda_ops.hookspecs import hookimpl
from cuda_ops.testing import Sample, TensorArg


@hookimpl
def cuda_ops_fake(op):
    return lambda x: x.new_empty(((x.shape[0] + 1) // 2, 2))


@hookimpl
def cuda_ops_samples(op):
    return st.sampled_from((2, 8, 64)).map(lambda n: Sample((TensorArg((n,)),)))
