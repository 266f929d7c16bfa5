from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd


@hookimpl
def cuda_ops_autograd(op):
    return Autograd(lambda ctx, inputs, output: None, lambda ctx, grad_out: None)
