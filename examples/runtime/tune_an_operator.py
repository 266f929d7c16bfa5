"""Choose a launch configuration by measuring, in a program.

The choice is kept in the cache; here in a folder that is gone afterwards, so that the example
changes nothing.
"""

import os
import tempfile

import torch

import cuda_ops
from cuda_ops.runtime import tune

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(32, 1 << 16, device=device)
expected = cuda_ops.sum_rows(x)

with tempfile.TemporaryDirectory() as folder:
    os.environ["CUDA_OPS_CACHE"] = folder
    first = tune("sum_rows", inputs=(x,))
    print(f"at first: {first.name}, as {first.reason}")
    measured = tune("sum_rows", inputs=(x,), anew=True)
    print(f"measured: {measured.name}, as {measured.reason}")
    again = tune("sum_rows", inputs=(x,))
    print(f"from now on: {again.name}, measured again: {again.measured}")

torch.testing.assert_close(cuda_ops.sum_rows(x), expected)
if device == "cpu":
    print("No GPU here: the knobs of sum_rows act on its CUDA kernel alone.")
