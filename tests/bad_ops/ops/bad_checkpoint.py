from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd


@hookimpl
def cuda_ops_autograd(op):
    def backward(ctx, grad_out):
        assert ctx.saved_tensors[0].shape == ctx.saved_tensors[0].shape
        return grad_out

    return Autograd(lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]), backward)
