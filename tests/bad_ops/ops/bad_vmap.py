from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_vmap(op):
    return lambda info, in_dims, x: (op.function(x), 0)
