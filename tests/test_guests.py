"""Pairs written as the tutorials write them build and load unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cuda_ops
from cuda_ops.build import compiling
from cuda_ops.build.discovery import Kind
from cuda_ops.compile_ops import compile_ops
from cuda_ops.registry import registry

ROOT = Path(__file__).parent / "guests"


@pytest.fixture(scope="module", autouse=True)
def guests_root() -> None:
    registry().add_root(ROOT)


def test_pybind11_module_is_reachable_by_function() -> None:
    assert registry().pairs()["tutorial_silu"].kind is Kind.PYBIND
    (row,) = compile_ops(["tutorial_silu"])
    assert not row.error, row.error
    assert "no autograd" in row.note
    x = torch.randn(5)
    torch.testing.assert_close(cuda_ops.tutorial_silu.forward(x), F.silu(x))
    if torch.cuda.is_available():
        torch.testing.assert_close(cuda_ops.tutorial_silu.forward(x.cuda()).cpu(), F.silu(x))


def test_torch_library_guest_keeps_its_namespace() -> None:
    (row,) = compile_ops(["library_mul"])
    assert not row.error, row.error
    assert "no reload in place" in row.note
    a = torch.randn(3)
    assert torch.equal(torch.ops.guest_ops.mul(a, a), a * a)


def test_guest_whose_cuda_headers_are_missing_says_so() -> None:
    pair = registry().pairs()["tutorial_silu"]
    log = "tutorial_silu.cu:2:10: fatal error: c10/cuda/CUDAStream.h: No such file or directory"
    reason = compiling.explain_failure(pair, log)
    assert "needs torch's CUDA headers" in reason and "CUDAStream.h" in reason
