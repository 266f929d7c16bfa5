"""A package that brings an operator to cuda_ops: ``cuda_ops.leaky_clip``."""
