import torch

from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    return torch.maximum if op.name == "bad_gradient_tie" else None
