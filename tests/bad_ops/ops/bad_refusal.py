from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    def reference(x, times=1):
        if times > 5:
            raise ValueError(f"expected at most 5 times, got {times}")
        return x * times

    return reference
