"""Every file pair under ``src/`` becomes a library; the rest is in ``pyproject.toml``."""

from setuptools import setup

from cuda_ops.packaging import operators

setup(**operators("cuda_ops.src", "src"))
