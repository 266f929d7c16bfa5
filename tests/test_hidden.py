"""Words of a binding on gradients: results that are for them alone, and arguments without one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from specs import pair, spec

from cuda_ops.benchmarking.training import with_gradients
from cuda_ops.derive.gradient import cuda_ops_autograd
from cuda_ops.dispatch.words import words_of
from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.signature import parse_signature
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import by_name

SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
#include <cmath>
using namespace cuda_ops;
namespace {
std::tuple<Tensor, Tensor> root(const Tensor& x, const Tensor& by) {
  Tensor out = elementwise_cpu([](double v, double b) { return std::sqrt(v * v + 1) * b; }, x, by);
  Tensor slope = elementwise_cpu([](double v, double b) { return v / std::sqrt(v * v + 1) * b; },
                                 x, by);
  return {out, slope};
}
Tensor root_backward(const Tensor& grad_out, const Tensor& slope) {
  return elementwise_cpu([](double g, double s) { return g * s; }, grad_out, slope);
}
std::tuple<Tensor, Tensor, Tensor> both(const Tensor& x) {
  return {elementwise_cpu([](double v) { return 2 * v; }, x),
          elementwise_cpu([](double v) { return 3 * v; }, x),
          elementwise_cpu([](double v) { return 1; }, x)};
}
Tensor both_backward(const Tensor& grad_first, const Tensor& grad_second, const Tensor& ones) {
  return elementwise_cpu([](double a, double b, double one) { return (2 * a + 3 * b) * one; },
                         grad_first, grad_second, ones);
}
Tensor fixed(const Tensor& x) { return elementwise_cpu([](double v) { return v; }, x); }
}
CUDA_OPS(library) {
  library.op("OP(Tensor x, Tensor by) -> (Tensor out, Tensor slope)", "(),()->(),()")
      .dtypes(kFloating).hidden("slope").no_gradient("by").cpu<root>();
  library.op("OP_backward(Tensor grad_out, Tensor slope) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating).cpu<root_backward>();
  library.op("OP_both(Tensor x) -> (Tensor first, Tensor second, Tensor ones)", "()->(),(),()")
      .dtypes(kFloating).hidden("ones").cpu<both>();
  library.op("OP_both_backward(Tensor grad_first, Tensor grad_second, Tensor ones) -> Tensor "
             "grad_x", "(),(),()->()").dtypes(kFloating).cpu<both_backward>();
  library.op("OP_fixed(Tensor x) -> Tensor", "()->()").dtypes(kFloating).no_gradient("x")
      .cpu<fixed>();
}
"""
PLUGIN = """
import torch
from cuda_ops.hookspecs import hookimpl

@hookimpl
def cuda_ops_reference(op):
    if op.name == op.stem:
        return lambda x, by: (x * x + 1).sqrt() * by
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_hidden", scratch_root)
    source = SOURCE.replace('"OP', f'"{scratch.name}')
    with scratch.built(source, plugin=PLUGIN) as row:
        assert row.autograd == "yes, not by"
        yield scratch.name


def expected(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x * x + 1).sqrt() * by


def test_the_caller_sees_what_is_not_hidden(name: str) -> None:
    x, by = torch.randn(4, 3), torch.randn(3)
    function, dispatcher = registry().public(name), getattr(torch.ops.cuda_ops, name)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            out = function(x, by)
            assert isinstance(out, torch.Tensor)
            torch.testing.assert_close(out, expected(x, by))
            assert len(dispatcher(x, by)) == 2
    first, second = registry().public(f"{name}_both")(x)
    assert torch.equal(first, 2 * x) and torch.equal(second, 3 * x)


def test_its_gradient_uses_what_is_hidden(name: str) -> None:
    x, by = torch.randn(4, 3, requires_grad=True), torch.randn(3)
    function = registry().public(name)
    (wanted,) = torch.autograd.grad(expected(x, by).sum(), x)
    (found,) = torch.autograd.grad(function(x, by).sum(), x)
    torch.testing.assert_close(found, wanted)
    found = torch.func.grad(lambda v: function(v, by).sum())(x.detach())
    torch.testing.assert_close(found, wanted)
    hidden = getattr(torch.ops.cuda_ops, name)(x, by)[1]
    assert not hidden.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(function(x, by), torch.Tensor)


def test_transforms_compile_and_export_see_the_same(name: str) -> None:
    x, by = torch.randn(4, 3), torch.randn(3)
    function = registry().public(name)
    wanted = expected(x, by)
    torch.testing.assert_close(torch.vmap(function, in_dims=(1, 0), out_dims=1)(x, by), wanted)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, by), wanted)
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(compiled(leaf, by).sum(), leaf)
    torch.testing.assert_close(found, x / (x * x + 1).sqrt() * by)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, by: torch.Tensor) -> Any:
            return function(x, by)

    torch.testing.assert_close(torch.export.export(Module(), (x, by)).module()(x, by), wanted)
    traced = torch.fx.symbolic_trace(Module())
    torch.testing.assert_close(traced(x, by), wanted)
    shown = torch.func.functionalize(function)(x, by)
    torch.testing.assert_close(shown, wanted)


def test_help_shows_what_is_returned(name: str) -> None:
    assert inspect.getdoc(registry().public(name)) == (
        f"``cuda_ops::{name}(Tensor x, Tensor by) -> Tensor out``"
    )
    doc = inspect.getdoc(registry().public(f"{name}_both"))
    assert doc is not None and doc.endswith("-> (Tensor first, Tensor second)``")


@pytest.mark.parametrize("check", ["reference", "public", "gradcheck", "gradient_declared", "vmap"])
def test_the_kit_takes_a_reference_without_it(name: str, check: str) -> None:
    for one in (name, f"{name}_both"):
        report = check_op(one, checks=[by_name(check)], devices=["cpu"], isolate=False)
        assert report.passed, report


def test_an_argument_without_a_gradient_says_so(name: str) -> None:
    x, by = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    function = registry().public(name)
    message = rf"{name} has no gradient for 'by', by design: pass by.detach\(\)"
    with pytest.raises(RuntimeError, match=message):
        function(x, by).sum().backward()
    function(x, by.detach()).sum().backward()
    with pytest.raises(RuntimeError, match=f"{name}_fixed has no gradient, by design"):
        registry().public(f"{name}_fixed")(x).sum().backward()


def entry(**words: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("hidden", "no_gradient", "linear", "tags", "nondeterministic"), ())
    return {**empty, "broadcast": False, "signature": "(n),()->(n),(n)", **words}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            {"hidden": ["y"]},
            r"return 'y': expected 'out' or 'lse', which \.hidden may name, got 'y'",
        ),
        ({"hidden": ["out"]}, r"return 'out': expected the results that cuda_ops returns before"),
        ({"hidden": ["out", "lse"]}, "return 'out': expected the results that"),
        ({"hidden": ["lse", "lse"]}, r"'lse': expected to be named once by \.hidden, got twice"),
        (
            {"no_gradient": ["k"]},
            r"'k': expected 'x' or 'y' or 'out' or 'lse', which \.no_gradient may name",
        ),
        ({"linear": ["y"], "no_gradient": ["y"]}, r"'y': expected \.linear or \.no_gradient"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: dict[str, Any], text: str) -> None:
    schema = torch._C.parse_schema("f(Tensor x, Tensor y, int k) -> (Tensor out, Tensor lse)")
    with pytest.raises(ManifestError, match=rf"cuda_ops::f: .*{text}"):
        words_of("cuda_ops::f", entry(**words), schema, parse_signature("(n),()->(n),(n)"), False)


def test_a_name_of_an_argument_and_a_result_is_ambiguous() -> None:
    schema = torch._C.parse_schema("f(Tensor x) -> Tensor x")
    with pytest.raises(ManifestError, match="'x': expected an output of another name"):
        words_of("cuda_ops::f", entry(no_gradient=["x"]), schema, parse_signature("()->()"), False)


def test_a_gradient_that_is_none_by_design_is_not_returned() -> None:
    op = pair(
        spec("f(Tensor x, Tensor y) -> Tensor", "(),()->()", no_gradient=("y",)),
        spec("f_backward(Tensor grad_out, Tensor x) -> (Tensor grad_x, Tensor grad_y)", ""),
    )
    with pytest.raises(ManifestError, match=r"return 'grad_y': expected none, as \.no_gradient"):
        cuda_ops_autograd(op)


def test_a_step_of_training_asks_for_the_gradients_that_there_are(name: str) -> None:
    x, by = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    function = registry().public(name)
    out, grad_x = with_gradients(function, fixed=(1,))(x, by)
    torch.testing.assert_close(out, expected(x, by))
    torch.testing.assert_close(grad_x, out * x / (x * x + 1).sqrt() * by)
    with pytest.raises(RuntimeError, match="by design"):
        with_gradients(function)(x, by)
    *_, grad_x = with_gradients(lambda x: (2 * x, x * x), constants=(1,))(x)
    torch.testing.assert_close(grad_x, 4 * x)
