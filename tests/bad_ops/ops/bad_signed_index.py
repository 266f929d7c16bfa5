import torch

from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    def reference(table, index):
        padded = torch.cat([table, table.new_zeros(256)])
        return padded[index.long()]

    return reference
