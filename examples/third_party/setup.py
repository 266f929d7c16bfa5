from setuptools import setup

from cuda_ops.packaging import operators

setup(**operators("cuda_ops_leaky.src", "cuda_ops_leaky/src"))
