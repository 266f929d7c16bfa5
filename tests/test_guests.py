"""Pairs written as the tutorials write them build and load unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ScratchOp, needs_gpu

import cuda_ops
from cuda_ops.build import logs
from cuda_ops.build.source_text import Kind
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


@pytest.mark.slow
def test_launch_in_a_guest_does_not_compile(tmp_path: Path, roots_for_now: None) -> None:
    """The loader lends it no stream, and the kernel would never run."""
    (tmp_path / "bindings").mkdir()
    (tmp_path / "bindings" / "guest_launch.cpp").write_text("""
#include <torch/csrc/stable/library.h>
#include "launch.h"
using namespace cuda_ops;
Tensor run(const Tensor& x) {
  launch(x, [](cudaStream_t) { return cudaSuccess; });
  return x;
}
STABLE_TORCH_LIBRARY(guest_launch, m) { m.def("run(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(guest_launch, CPU, m) { m.impl("run", TORCH_BOX(&run)); }
""")
    registry().add_root(tmp_path)
    (row,) = compile_ops(["guest_launch"])
    assert "launch() needs CUDA_OPS(library); elsewhere, launch the kernel yourself" in row.error


@pytest.mark.slow
def test_launch_without_a_kernel_raises(scratch_op: ScratchOp) -> None:
    start = "(launch(x, [](cudaStream_t) { return cudaSuccess; }), 2)"
    scratch_op.write("v * factor")
    text = scratch_op.binding.read_text()
    scratch_op.binding.write_text(
        text.replace(
            "Tensor out = empty_elementwise(x);",
            f"const double factor = {start}; Tensor out = empty_elementwise(x);",
        )
    )
    (row,) = compile_ops([scratch_op.name], compare=False)
    assert not row.error, row.error
    with pytest.raises(
        RuntimeError,
        match=rf"^cuda_ops::{scratch_op.name}: this library was built without its CUDA",
    ):
        scratch_op.function(torch.ones(2))


@pytest.mark.parametrize(
    ("header", "torch_has_cuda", "reason"),
    [
        ("c10/cuda/CUDAStream.h", False, "and this torch is built without CUDA"),
        ("cusparse.h", False, "and this torch is built without CUDA"),
        ("cusparse.h", True, "of the CUDA toolkit, which is not in"),
        ("my_tile.cuh", True, "not beside the file that includes it and not in kernels, bindings"),
    ],
)
def test_a_missing_header_is_looked_for_where_it_belongs(
    header: str, torch_has_cuda: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0" if torch_has_cuda else None)
    pair = registry().pairs()["tutorial_silu"]
    log = f"tutorial_silu.cu:2:10: fatal error: {header}: No such file or directory"
    found = logs.explain_failure(pair, log)
    assert f"needs {header}" in found and reason in found and "tutorial_silu.cu:2" in found
