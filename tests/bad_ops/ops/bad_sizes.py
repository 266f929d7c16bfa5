from cuda_ops.derive import rules
from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_fake(op):
    right = rules.cuda_ops_fake(op)

    def fake(x):
        for size in x.shape:
            int(size)  # a symbol becomes the number that it stands for just now
        return right(x)

    return fake
