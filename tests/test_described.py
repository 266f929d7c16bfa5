"""Guests that a plugin describes: their functions become operators, checked like any other."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_gpu

import cuda_ops
from cuda_ops.compile_ops import compile_ops
from cuda_ops.dev.command import main
from cuda_ops.dispatch import described as described_operators
from cuda_ops.dispatch.described import foreign_spec
from cuda_ops.errors import CudaOpsError, ManifestError
from cuda_ops.registry import all_operators, operators_of, registry
from cuda_ops.spec import GuestOperator
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import QUICK

#: A module of Python objects needs no header of torch, and builds in a few seconds.
GUEST = """
#include <pybind11/pybind11.h>
namespace py = pybind11;
static py::object forward(py::object x) {
  if (!x.attr("is_contiguous")().cast<bool>()) throw std::runtime_error("x must be contiguous");
  return x.attr("mul")(x.attr("sigmoid")())FACTOR;
}
static py::object backward(py::object grad, py::object x) {
  py::object s = x.attr("sigmoid")();
  return grad.attr("mul")(s + s * x * (py::int_(1) - s));
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
  m.def("add_into", [](py::object y, py::object x) { return y.attr("add_")(x); });
  m.def("halves", [](py::object x) { return x.attr("chunk")(2, -1); });
}
"""
PLUGIN = """
import torch
import torch.nn.functional as F
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import GuestOperator

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

@hookimpl
def cuda_ops_guest():
    return [
        GuestOperator("{op}(Tensor x) -> Tensor", "()->()", devices=("cpu", "cuda"),
                      dtypes=FLOATING, doc="Returns x * sigmoid(x)."),
        GuestOperator("{op}_backward(Tensor grad_out, Tensor x) -> Tensor", "(),()->()",
                      devices=("cpu", "cuda"), dtypes=FLOATING),
        GuestOperator("{op}_add_into(Tensor(a!) y, Tensor x) -> ()", "(n),(n)->",
                      devices=("cpu",), dtypes=FLOATING),
    ]

@hookimpl
def cuda_ops_reference(op):
    return F.silu if op.name == "{op}" else None
"""


class Described:
    """A guest in a root of its own."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.binding = root / "bindings" / f"{name}.cpp"
        self.plugin = root / "ops" / f"{name}.py"
        for file in (self.binding, self.plugin):
            file.parent.mkdir(exist_ok=True)
        registry().add_root(root)

    def write(self, plugin: str = PLUGIN, factor: str = "", binding: str = GUEST) -> None:
        self.binding.write_text(binding.replace("FACTOR", factor))
        self.plugin.write_text(textwrap.dedent(plugin).replace("{op}", self.name))

    def built(self, plugin: str = PLUGIN, factor: str = "", binding: str = GUEST) -> Any:
        self.write(plugin, factor, binding)
        (row,) = compile_ops([self.name])
        return row


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    root = tmp_path_factory.mktemp("described")
    guest = Described(root, "described_silu")
    row = guest.built()
    assert not row.error, row.error
    yield guest
    registry().drop_root(root)


@pytest.mark.slow
def test_a_function_of_a_guest_is_an_operator(described: Described) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = cuda_ops.described_silu(x)
    torch.testing.assert_close(y, F.silu(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(F.silu(x).sum(), x)
    torch.testing.assert_close(grad, expected)
    assert torch.ops.cuda_ops.described_silu(x.detach()).shape == x.shape
    assert "sigmoid" in cuda_ops.described_silu.__doc__
    with pytest.raises(RuntimeError, match=r"argument 'x': expected dtype float64, .*got int64"):
        cuda_ops.described_silu(torch.ones(2, dtype=torch.int64))


@pytest.mark.slow
def test_the_guest_s_own_functions_stay_where_they_were(described: Described) -> None:
    x = torch.randn(4)
    torch.testing.assert_close(cuda_ops.described_silu.forward(x), F.silu(x))
    first, second = cuda_ops.described_silu.halves(x)
    assert torch.equal(torch.cat([first, second]), x)


@pytest.mark.slow
def test_its_function_gets_contiguous_tensors(described: Described) -> None:
    x = torch.randn(3, 4).t()
    with pytest.raises(RuntimeError, match="must be contiguous"):
        cuda_ops.described_silu.forward(x)
    torch.testing.assert_close(cuda_ops.described_silu(x), F.silu(x))


@pytest.mark.slow
def test_it_works_under_torch_compile_and_vmap(described: Described) -> None:
    x = torch.randn(3, 4)
    compiled = torch.compile(cuda_ops.described_silu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.t()), F.silu(x.t()))
    torch.testing.assert_close(torch.vmap(cuda_ops.described_silu)(x), F.silu(x))


@pytest.mark.slow
def test_an_argument_is_written(described: Described) -> None:
    y, x = torch.zeros(3), torch.randn(3)
    assert cuda_ops.described_silu_add_into(y, x) is None
    assert torch.equal(y, x)


@pytest.mark.slow
def test_the_kit_checks_it_like_any_other(described: Described) -> None:
    names = operators_of([described.name])
    assert names[0] == described.name and len(names) == 3
    assert described.name in all_operators()
    report = check_op(described.name, checks=QUICK, devices=["cpu"])
    assert report.passed, report
    assert {"reference", "gradcheck", "compile_static", "vmap"} <= {
        entry.check for entry in report.entries if entry.passed
    }


@pytest.mark.slow
def test_the_command_line_checks_it_too(
    described: Described, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([described.name, "--root", str(described.root), "--check", "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    (row,) = json.loads(captured.out)
    assert (row["fake"], row["autograd"]) == ("yes", "yes")
    assert row["note"] == "" and "single build for every torch" in row["hints"][0]
    assert [entry["op"] for entry in row["checks"]] == operators_of([described.name])


@pytest.mark.slow
def test_a_wrong_guest_is_found_and_a_reload_runs_the_new_code(described: Described) -> None:
    before = cuda_ops.described_silu
    row = described.built(factor='.attr("mul")(2)')
    assert "wrong on c" in row.error  # on the CPU, or the GPU where there is one
    x = torch.randn(3)
    torch.testing.assert_close(before(x), 2 * F.silu(x))
    torch.testing.assert_close(cuda_ops.described_silu.forward(x), 2 * F.silu(x))
    row = described.built()
    assert not row.error, row.error
    torch.testing.assert_close(before(x), F.silu(x))


def one(answer: str) -> str:
    return (
        "import torch\nfrom cuda_ops.hookspecs import hookimpl\n"
        "from cuda_ops.spec import GuestOperator\n\n"
        f"@hookimpl\ndef cuda_ops_guest():\n    return [{answer}]\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "error"),
    [
        ("x = 1\n", "expected cuda_ops_guest to describe .*'described_silu'.*, got nothing"),
        (one("GuestOperator('{op}(Tensor x) -> Tensor')"), "expected devices of 'cpu' and 'cuda'"),
        (
            one("GuestOperator('{op}(Tensor x) -> Tensor', devices=('tpu',))"),
            "expected devices .* got 'tpu'",
        ),
        (
            one("GuestOperator('{op}(Tensor x) -> Tensor', '()->()', devices=('cpu',), "
                "function='sideways')"),
            "expected a function 'sideways' .*got add_into, backward, forward, halves",
        ),
        (
            one("GuestOperator('{op}(Tensor x) -> Tensor', '(),()->()', devices=('cpu',))"),
            "2 tensor arguments, the schema has 1",
        ),
        (
            one("GuestOperator('other(Tensor x) -> Tensor', devices=('cpu',))"),
            "ops/described_silu.py: operator 'other' must be named 'described_silu'",
        ),
        (one("GuestOperator('no_such::op', '()->()')"), "got 'no_such::op', which torch does not"),
        (one("'forward'"), "expected a list of GuestOperator"),
    ],
)  # fmt: skip
def test_what_a_plugin_says_wrongly_is_refused(
    described: Described, plugin: str, error: str
) -> None:
    try:
        row = described.built(plugin)
        assert re.search(error, row.error), row.error
        x = torch.randn(3)  # what was described before goes on serving
        torch.testing.assert_close(cuda_ops.described_silu(x), F.silu(x))
    finally:
        row = described.built()
        assert not row.error, row.error


@pytest.mark.slow
def test_an_operator_that_the_guest_registers_itself(
    tmp_path: Path, roots_for_now: None, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(quick_compiler))
    guest = Described(tmp_path, "described_mul")
    binding = """
#include <torch/library.h>
#include <ATen/ATen.h>
at::Tensor mul_cpu(const at::Tensor& a, const at::Tensor& b) { return a * b; }
at::Tensor mul_meta(const at::Tensor& a, const at::Tensor& b) { return at::empty_like(a); }
TORCH_LIBRARY(described_ops, m) { m.def("mul(Tensor a, Tensor b) -> Tensor"); }
TORCH_LIBRARY_IMPL(described_ops, CPU, m) { m.impl("mul", &mul_cpu); }
TORCH_LIBRARY_IMPL(described_ops, Meta, m) { m.impl("mul", &mul_meta); }
"""
    plugin = one("GuestOperator('described_ops::mul', '[n],[n]->[n]', dtypes=(torch.float32,))")
    plugin += """

@hookimpl
def cuda_ops_reference(op):
    return torch.mul
"""
    row = guest.built(plugin, binding=binding)
    assert not row.error, row.error
    assert (row.devices, row.fake, row.autograd) == ("cpu", "its own", "no")
    assert row.max_error is not None and row.max_error < 1e-6
    report = check_op("described_ops::mul", checks=QUICK, devices=["cpu"])
    assert report.passed, report
    row = guest.built(plugin.replace("return torch.mul", "return torch.add"), binding=binding)
    assert "described_ops::mul: wrong on cpu" in row.error


@needs_gpu
@pytest.mark.slow
def test_a_guest_is_checked_on_a_gpu(described: Described) -> None:
    report = check_op(described.name, checks=QUICK, devices=["cuda"])
    assert report.passed, report


def test_a_signature_line_that_does_not_fit_a_registered_operator() -> None:
    with pytest.raises(ManifestError, match=r"aten::relu: .*2 tensor arguments"):
        foreign_spec("aten::relu", "(),()->()")
    with pytest.raises(ManifestError, match=r"aten::relu: .*has 2 outputs, the schema has 1$"):
        foreign_spec("aten::relu", "()->(),()")


@pytest.mark.parametrize("line", ["()->", "()->()"])
def test_a_line_may_list_what_is_written_or_not(line: str) -> None:
    assert foreign_spec("aten::relu_", line).signature is not None


def test_arguments_and_results_of_a_registered_operator_may_have_no_gradient() -> None:
    pair: Any = SimpleNamespace(plugin="ops/ends.py", stem="ends", key="ends")
    told = GuestOperator("aten::_aminmax", no_gradient=("self", "out1"), dtypes=(torch.float32,))
    op = described_operators._registered(pair, told)
    assert (op.no_gradient, op.no_gradient_outputs) == (("self",), ("out1",))
    assert op.constants == ("out1",)


@pytest.mark.slow
def test_a_guest_that_nothing_describes_says_where_to_describe_it(
    tmp_path: Path, roots_for_now: None
) -> None:
    guest = Described(tmp_path, "described_by_nothing")
    guest.binding.write_text(GUEST.replace("FACTOR", ""))
    (row,) = compile_ops([guest.name])
    assert "no checks" in row.note
    with pytest.raises(CudaOpsError, match=r"cuda_ops_guest in .*ops/described_by_nothing\.py"):
        check_op(guest.name)
