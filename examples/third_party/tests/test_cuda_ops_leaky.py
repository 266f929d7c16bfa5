"""The operator against torch's own, and through every check of cuda_ops."""

from __future__ import annotations

import cuda_ops_leaky
import pytest
import torch
from cuda_ops_leaky.plugin import OP, torch_leaky_clip

from cuda_ops.testing import check_op

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
ARGUMENTS = (0.1, 2.0)


@devices
def test_it_computes_what_torch_does(device: str) -> None:
    x = torch.linspace(-3, 3, 1001, device=device)
    torch.testing.assert_close(
        cuda_ops_leaky.leaky_clip(x, *ARGUMENTS), torch_leaky_clip(x, *ARGUMENTS)
    )


@devices
def test_its_gradient_is_right(device: str) -> None:
    x = torch.linspace(-3, 3, 10, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: cuda_ops_leaky.leaky_clip(x, *ARGUMENTS), x)


def test_the_checks_of_cuda_ops_pass() -> None:
    report = check_op(OP)  # pytest --cuda-ops leaky_clip makes a test of each
    assert report.passed, str(report)
