from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    return lambda x: x.logsumexp(-1)
