import torch

from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    return lambda x, size: x[..., None] * torch.arange(size)
