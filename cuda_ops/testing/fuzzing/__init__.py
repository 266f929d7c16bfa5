"""Calls operators with wrong arguments until one breaks: ``python -m cuda_ops.testing fuzz``."""
