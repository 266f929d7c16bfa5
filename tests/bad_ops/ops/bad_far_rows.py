from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    return lambda table, index: table[index]
