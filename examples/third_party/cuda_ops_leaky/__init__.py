"""Operators for PyTorch in a namespace of their own: ``cuda_ops_leaky.leaky_clip``."""

from cuda_ops.namespaces import expose

__getattr__, __dir__ = expose("cuda_ops_leaky", __name__)
