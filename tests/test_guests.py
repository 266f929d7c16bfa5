"""Pairs written as the tutorials write them build and load unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_gpu

import cuda_ops
from cuda_ops.build import compiling
from cuda_ops.build.discovery import Kind
from cuda_ops.compile_ops import compile_ops
from cuda_ops.registry import registry

ROOT = Path(__file__).parent / "guests"


@pytest.fixture(autouse=True)
def _root(quick_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry().add_root(ROOT)
    monkeypatch.setenv("CXX", str(quick_compiler))


@pytest.mark.slow
def test_pybind11_module_is_reachable_by_function() -> None:
    assert registry().pairs()["tutorial_silu"].kind is Kind.PYBIND
    (row,) = compile_ops(["tutorial_silu"])
    assert not row.error, row.error
    assert "no autograd" in row.note
    x = torch.randn(5)
    torch.testing.assert_close(cuda_ops.tutorial_silu.forward(x), F.silu(x))
    if torch.cuda.is_available():
        torch.testing.assert_close(cuda_ops.tutorial_silu.forward(x.cuda()).cpu(), F.silu(x))


@needs_gpu
@pytest.mark.slow
def test_a_kernel_may_include_all_of_torch(tmp_path: Path, roots_for_now: None) -> None:
    """Runs only on machines with a GPU: nvcc takes over a minute."""
    binding, kernel = (
        (ROOT / folder / f"tutorial_silu.{suffix}").read_text()
        for folder, suffix in (("bindings", "cpp"), ("kernels", "cu"))
    )
    body = kernel.partition("template")[2]
    (tmp_path / "bindings").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "bindings" / "all_of_torch.cpp").write_text(binding)
    (tmp_path / "kernels" / "all_of_torch.cu").write_text(
        f"#include <torch/extension.h>\n\ntemplate{body}"
    )
    registry().add_root(tmp_path)
    (row,) = compile_ops(["all_of_torch"])
    assert not row.error, row.error
    x = torch.randn(5, device="cuda")
    torch.testing.assert_close(cuda_ops.all_of_torch.forward(x), F.silu(x))


@pytest.mark.slow
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
