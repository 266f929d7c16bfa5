from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    return (lambda x: x * x) if op.name == "bad_gradient_zero" else None
