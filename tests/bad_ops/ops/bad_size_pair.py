import torch

from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    def reference(x, size):
        return x[..., torch.arange(size) * x.shape[-1] // size]

    return reference
