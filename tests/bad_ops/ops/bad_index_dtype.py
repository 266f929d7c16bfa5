import torch

from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_fake(op):
    return lambda table, index: table.new_empty((index.shape[0], table.shape[1]))


@hookimpl
def cuda_ops_reference(op):
    return lambda table, index: table[index]


@hookimpl
def cuda_ops_samples(op):
    from hypothesis import strategies as st

    from cuda_ops.testing import Sample, TensorArg

    def sample(rows, cols, count, seed):
        index = TensorArg((count,), torch.int64, below=rows)
        return Sample((TensorArg((rows, cols)), index), seed=seed)

    sizes = st.integers(1, 9)
    return st.builds(sample, sizes, sizes, sizes, st.integers(0, 1000))
