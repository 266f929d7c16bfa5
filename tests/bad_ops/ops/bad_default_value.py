from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    def reference(x, by=1e-5):
        return x + by

    return reference
