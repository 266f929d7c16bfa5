import torch

from cuda_ops.hookspecs import hookimpl


def reference(x, slope=0.25):
    return torch.where(x > 0, x, slope * x)


@hookimpl
def cuda_ops_reference(op):
    return reference if op.name == "bad_scalar_gradient" else None
