import torch

from cuda_ops.hookspecs import hookimpl

KEY = torch.tensor([1, 2])


@hookimpl
def cuda_ops_public(op):
    def bad_draws(x, key=None):
        return op.function(x, KEY.to(x.device) if key is None else key)

    return bad_draws
