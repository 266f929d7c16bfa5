"""Outputs whose gradient a formula does not take: it is refused where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from specs import pair, spec
from torch.utils.checkpoint import checkpoint

from cuda_ops.derive import gradient
from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import by_name

#: y is twice x, z three times, and each operator takes the gradient of y alone.
SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
std::tuple<Tensor, Tensor> both(const Tensor& x) {
  return elementwise_cpu<2>([](double v) { return Results<double, 2>{{2 * v, 3 * v}}; }, x);
}
std::tuple<Tensor, Tensor> second(const Tensor& x, const Tensor& w) {
  return elementwise_cpu<2>(
      [](double v, double) { return Results<double, 2>{{3 * v, 2 * v}}; }, x, w);
}
std::tuple<Tensor, Tensor> kept(const Tensor& x) { return both(x); }
Tensor backward(const Tensor& grad_y) {
  return elementwise_cpu([](double g) { return 2 * g; }, grad_y);
}
Tensor second_backward(const Tensor& grad_z) { return backward(grad_z); }
std::tuple<Tensor, Tensor> constant(const Tensor& x) { return both(x); }
std::tuple<Tensor, Tensor> constants(const Tensor& x) { return both(x); }
std::tuple<Tensor, Tensor> unwritten(const Tensor& x) { return both(x); }
Tensor constant_backward(const Tensor& grad_y, const Tensor& z) {
  return elementwise_cpu([](double g, double v) { return 2 * g + 0 * v; }, grad_y, z);
}
Tensor kept_backward(const Tensor& grad_y, const Tensor& z) {
  return elementwise_cpu([](double g, double v) { return 2 * g + 0 * v; }, grad_y, z);
}
}
CUDA_OPS(library) {
  library.op("NAME(Tensor x) -> (Tensor y, Tensor z)", "()->(),()").dtypes(kFloating).cpu<both>();
  library.op("NAME_backward(Tensor grad_y) -> Tensor grad_x", "()->()")
      .dtypes(kFloating).cpu<backward>();
  library.op("NAME_second(Tensor x, Tensor w) -> (Tensor y, Tensor z)", "(),()->(),()")
      .dtypes(kFloating).cpu<second>();
  library.op("NAME_second_backward(Tensor grad_z) -> Tensor grad_x", "()->()")
      .dtypes(kFloating).cpu<second_backward>();
  library.op("NAME_kept(Tensor x) -> (Tensor y, Tensor z)", "()->(),()")
      .dtypes(kFloating).saved("z").cpu<kept>();
  library.op("NAME_kept_backward(Tensor grad_y, Tensor z) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating).cpu<kept_backward>();
  library.op("NAME_constant(Tensor x) -> (Tensor y, Tensor z)", "()->(),()")
      .dtypes(kFloating).no_gradient("z").cpu<constant>();
  library.op("NAME_constant_backward(Tensor grad_y, Tensor z) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating).cpu<constant_backward>();
  library.op("NAME_constants(Tensor x) -> (Tensor y, Tensor z)", "()->(),()")
      .dtypes(kFloating).no_gradient("y").no_gradient("z").cpu<constants>();
  library.op("NAME_unwritten(Tensor x) -> (Tensor y, Tensor z)", "()->(),()")
      .dtypes(kFloating).no_gradient("z").cpu<unwritten>();
}
"""
LOST = (
    r"cuda_ops::scratch_lost has no gradient through 'z': take grad_z in scratch_lost_backward, or "
    r"write \.no_gradient\(\"z\"\) in scratch_lost\.cpp if that is by design"
)
PLUGIN = """
from cuda_ops.hookspecs import hookimpl


@hookimpl
def cuda_ops_reference(op):
    if not op.name.endswith("_backward"):
        return lambda x, *others: (2 * x, 3 * x)
"""


@pytest.fixture(scope="module")
def name(scratch_root: Any) -> Iterator[str]:
    scratch = ScratchOp("scratch_lost", scratch_root)
    with scratch.built(SOURCE.replace("NAME", scratch.name), plugin=PLUGIN, compare=False):
        yield scratch.name


def called(name: str, by: str) -> Callable[..., Any]:
    public = registry().public(name)
    if by == "compiled":
        torch._dynamo.reset()
        return torch.compile(public, fullgraph=True, backend="aot_eager")
    return public if by == "function" else getattr(torch.ops.cuda_ops, name)


each_way = pytest.mark.parametrize("by", ["function", "dispatcher", "compiled"])


@each_way
def test_a_gradient_through_an_output_that_no_argument_names_is_refused(name: str, by: str) -> None:
    function = called(name, by)
    x = torch.randn(3, requires_grad=True)
    y = function(x)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 2.0))
    for use in (lambda y, z: z, lambda y, z: y + z, lambda y, z: y * z):
        with pytest.raises(RuntimeError, match=LOST):
            torch.autograd.grad(use(*function(x)).sum(), x)


def test_transforms_refuse_it_too(name: str) -> None:
    function, x = registry().public(name), torch.randn(4, 3)
    for part, expected in ((0, torch.full((4, 3), 2.0)), (1, None)):
        for transform in (
            torch.func.grad(lambda x, part=part: function(x)[part].sum()),
            torch.vmap(torch.func.grad(lambda x, part=part: function(x)[part].sum())),
        ):
            if expected is not None:
                torch.testing.assert_close(transform(x), expected)
            else:
                with pytest.raises(RuntimeError, match=LOST):
                    transform(x)
    y, z = function(x.requires_grad_())
    ones = torch.ones(2, 4, 3)
    (grad,) = torch.autograd.grad([y], [x], [ones], is_grads_batched=True, retain_graph=True)
    assert torch.equal(grad, torch.full((2, 4, 3), 2.0))
    with pytest.raises(RuntimeError, match=LOST):
        torch.autograd.grad([z], [x], [ones], is_grads_batched=True)


@each_way
def test_the_first_output_may_be_the_one_that_is_lost(name: str, by: str) -> None:
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    y, z = called(f"{name}_second", by)(x, w)
    assert torch.equal(torch.autograd.grad(z.sum(), x, retain_graph=True)[0], torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="has no gradient through 'y'"):
        torch.autograd.grad(y.sum(), x)
    y, z = called(f"{name}_second", by)(x, w.requires_grad_())
    with pytest.raises(RuntimeError, match="has no gradient for 'w'"):
        z.sum().backward()


@each_way
@pytest.mark.parametrize("op", ["kept", "constant"])
def test_an_output_that_is_declared_so_has_no_gradient(name: str, by: str, op: str) -> None:
    """As the indices of torch.max: a loss that uses them alone has nothing to differentiate."""
    x = torch.randn(3, requires_grad=True)
    function = called(f"{name}_{op}", by)
    y, z = function(x)
    assert y.requires_grad and not z.requires_grad
    assert torch.equal(torch.autograd.grad((y + z).sum(), x)[0], torch.full((3,), 2.0))
    y, z = checkpoint(function, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad((y + z).sum(), x)[0], torch.full((3,), 2.0))


@pytest.mark.parametrize("op", ["kept", "constant"])
def test_transforms_take_it_for_a_constant(name: str, op: str) -> None:
    function, x = registry().public(f"{name}_{op}"), torch.randn(4, 3)
    for transform in (torch.func.grad, lambda f: torch.vmap(torch.func.grad(f))):
        found = transform(lambda x: (function(x)[0] + function(x)[1]).sum())(x)
        assert torch.equal(found, torch.full((4, 3), 2.0))
    _, (tangent_y, tangent_z) = torch.func.jvp(function, (x,), (torch.ones(4, 3),))
    assert torch.equal(tangent_y, torch.full((4, 3), 2.0)) and not tangent_z.any()


def test_an_operator_without_a_gradient_has_outputs_that_need_none(name: str) -> None:
    x = torch.randn(3, requires_grad=True)
    y, z = registry().public(f"{name}_constants")(x)
    assert not y.requires_grad and not z.requires_grad
    constants, unwritten = (registry().loaded(f"{name}_{op}") for op in ("constants", "unwritten"))
    assert gradient.why_none(constants.spec, constants.now.autograd) == "by design"
    assert (
        gradient.why_none(unwritten.spec, unwritten.now.autograd) == f"no {name}_unwritten_backward"
    )
    y, z = unwritten.public(x)
    assert y.requires_grad and not z.requires_grad
    with pytest.raises(RuntimeError, match=f"has no gradient: add {name}_unwritten_backward"):
        y.sum().backward()


#: Two of them hand torch's error on in one of their own.
CHECKS = ("gradient_declared", "gradcheck", "gradient_outputs", "opcheck", "compile_static", "jvp")


def test_the_kit_says_once_that_a_gradient_is_lost(name: str) -> None:
    report = check_op(name, checks=map(by_name, CHECKS), devices=["cpu"], isolate=False)
    declared, *others = report.entries
    assert declared.passed is False and re.search(LOST, declared.detail)
    reason = "gradient_declared says which output has no gradient"
    assert [(entry.passed, entry.detail) for entry in others] == [(None, reason)] * len(others)


def test_the_kit_checks_the_outputs_that_have_one(name: str) -> None:
    op = f"{name}_constant"
    report = check_op(op, checks=map(by_name, CHECKS), devices=["cpu"], isolate=False)
    passed = {entry.check: entry.passed for entry in report.entries}
    assert passed == dict.fromkeys(CHECKS, True) | {"gradient_outputs": None}, report
    assert "it has one output with a gradient" in str(report)


@pytest.mark.parametrize(
    ("word", "field"), [("saved", "saved"), ("no_gradient", "no_gradient_outputs")]
)
def test_a_gradient_of_such_an_output_is_refused(word: str, field: str) -> None:
    op = spec("f(Tensor x) -> (Tensor y, Tensor z)", "", **{field: ("z",)})
    pair(op, spec("f_backward(Tensor grad_y, Tensor grad_z) -> Tensor grad_x", ""))
    expected = rf"^cuda_ops::f_backward: argument 'grad_z': expected none, as .{word}\(\"z\"\) says"
    with pytest.raises(ManifestError, match=expected):
        gradient.cuda_ops_autograd(op)
