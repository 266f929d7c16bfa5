from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_public(op):
    def bad_default(x, scale=2.0):
        return op.function(x, scale)

    return bad_default
