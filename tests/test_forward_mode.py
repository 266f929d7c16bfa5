"""Forward mode: ``<op>_jvp``, what follows from ``.linear`` and from the gradient, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from specs import pair, spec
from torch.autograd import forward_ad

from cuda_ops.derive.forward_mode import forward_mode
from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import by_name

SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
#include <cmath>
using namespace cuda_ops;
namespace {
Tensor square(const Tensor& x, const Tensor& w, double by) {
  return elementwise_cpu([=](double v, double s) { return v * v * s * by; }, x, w);
}
Tensor square_jvp(const Tensor& x, const Tensor& w, double by, const Tensor& tangent_x,
                  const std::optional<Tensor>& tangent_w) {
  Tensor of_x = elementwise_cpu([=](double v, double s, double t) { return 2 * v * s * t * by; },
                                x, w, tangent_x);
  if (!tangent_w) return of_x;
  return elementwise_cpu([=](double o, double v, double t) { return o + v * v * t * by; }, of_x, x,
                         *tangent_w);
}
Tensor product(const Tensor& x, const Tensor& y, const Tensor& c) {
  return elementwise_cpu([](double a, double b, double k) { return a * a * b * k; }, x, y, c);
}
std::tuple<Tensor, Tensor> product_backward(const Tensor& g, const Tensor& x, const Tensor& y,
                                            const Tensor& c) {
  return {elementwise_cpu([](double o, double a, double b, double k) { return 2 * o * a * b * k; },
                          g, x, y, c),
          elementwise_cpu([](double o, double a, double k) { return o * a * a * k; }, g, x, c)};
}
Tensor mix(const Tensor& a, const Tensor& b) {
  return elementwise_cpu([](double v, double w) { return v * w; }, a, b);
}
Tensor wrong_jvp(const Tensor& x, const Tensor& tangent_x) {
  return elementwise_cpu([](double v, double t) { return v * t; }, x, tangent_x);
}
Tensor wrong(const Tensor& x) { return elementwise_cpu([](double v) { return v * v; }, x); }
std::tuple<Tensor, Tensor> two(const Tensor& x) { return {wrong(x), wrong(x)}; }
Tensor two_jvp(const Tensor& x, const Tensor& tangent_x) { return wrong_jvp(x, tangent_x); }
}
CUDA_OPS(library) {
  library.op("OP(Tensor x, Tensor w, float by=1.0) -> Tensor", "(n),[n]->(n)")
      .dtypes(kFloating).cpu<square>();
  library.op("OP_jvp(Tensor x, Tensor w, float by, Tensor tangent_x, Tensor? tangent_w) -> Tensor",
             "(n),[n],(n),[n]->(n)").dtypes(kFloating).cpu<square_jvp>();
  library.op("OP_product(Tensor x, Tensor y, Tensor c) -> Tensor", "(),(),()->()")
      .dtypes(kFloating).no_gradient("c").cpu<product>();
  library.op("OP_product_backward(Tensor grad_out, Tensor x, Tensor y, Tensor c) -> (Tensor "
             "grad_x, Tensor grad_y)", "(),(),(),()->(),()").dtypes(kFloating)
      .cpu<product_backward>();
  library.op("OP_mix(Tensor a, Tensor b) -> Tensor", "(n),(n)->(n)")
      .dtypes(kFloating).linear("a").linear("b").cpu<mix>();
  library.op("OP_wrong(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<wrong>();
  library.op("OP_wrong_jvp(Tensor x, Tensor tangent_x) -> Tensor", "(),()->()").dtypes(kFloating)
      .cpu<wrong_jvp>();
  library.op("OP_two(Tensor x) -> (Tensor one, Tensor other)", "()->(),()").dtypes(kFloating)
      .cpu<two>();
  library.op("OP_two_jvp(Tensor x, Tensor tangent_x) -> Tensor tangent_one", "(),()->()")
      .dtypes(kFloating).cpu<two_jvp>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_forward", scratch_root)
    with scratch.built(SOURCE.replace('"OP', f'"{scratch.name}')):
        yield scratch.name


both = pytest.mark.parametrize("by", ["function", "dispatcher"])
Function = Callable[..., torch.Tensor]


def called(name: str, by: str) -> Function:
    return registry().public(name) if by == "function" else getattr(torch.ops.cuda_ops, name)


def cases(name: str, by: str) -> list[tuple[Function, Function, tuple[torch.Tensor, ...]]]:
    """Returns each operator with a derivative, the same from torch's, and arguments."""
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    c = torch.randn(4, 1, dtype=torch.float64)
    product = called(f"{name}_product", by)
    return [
        (called(name, by), lambda x, w: x * x * w, (x, w)),
        (lambda x, y: product(x, y, c), lambda x, y: x * x * y * c, (x, w)),
        (called(f"{name}_mix", by), lambda a, b: a * b, (x, torch.randn_like(x))),
    ]


def along_first(
    function: Function, other: torch.Tensor, x: torch.Tensor, tangent: torch.Tensor
) -> torch.Tensor:
    return torch.func.jvp(lambda v: function(v, other), (x,), (tangent,))[1]


@both
def test_jvp_of_each_argument_and_of_all(name: str, by: str) -> None:
    for function, reference, args in cases(name, by):
        tangents = tuple(map(torch.randn_like, args))
        for along in ((0,), (1,), (0, 1)):

            def partly(f: Function, *values: torch.Tensor) -> torch.Tensor:
                given = dict(zip(along, values, strict=True))  # noqa: B023 - called in this turn
                return f(*(given.get(i, value) for i, value in enumerate(args)))  # noqa: B023

            primals = tuple(args[i] for i in along)
            chosen = tuple(tangents[i] for i in along)
            found, expected = (
                torch.func.jvp(lambda *v, f=f: partly(f, *v), primals, chosen)
                for f in (function, reference)
            )
            torch.testing.assert_close(found, expected)
            for wants in (False, True):
                leaves = [value.clone().requires_grad_(wants) for value in primals]
                with forward_ad.dual_level(), torch.set_grad_enabled(wants):
                    duals = map(forward_ad.make_dual, leaves, chosen)
                    primal, tangent = forward_ad.unpack_dual(partly(function, *duals))
                    torch.testing.assert_close((primal, tangent), expected)


# torch.func.linearize of torch's own operators warns as well.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@both
def test_jacobians_linearize_and_batches(name: str, by: str) -> None:
    for function, reference, args in cases(name, by):
        for argument in (0, 1):
            found, expected = (torch.func.jacfwd(f, argument)(*args) for f in (function, reference))
            torch.testing.assert_close(found, expected)
        tangents = tuple(map(torch.randn_like, args))
        _, along = torch.func.linearize(function, *args)
        _, expected = torch.func.jvp(reference, args, tangents)
        torch.testing.assert_close(along(*tangents), expected)
        last = args[1] if args[1].dim() == 1 else args[1][0]
        mapped, wanted = (
            torch.vmap(partial(along_first, f, last))
            for f in (registry().public(f"{name}_mix"), lambda a, b: a * b)
        )
        torch.testing.assert_close(mapped(args[0], tangents[0]), wanted(args[0], tangents[0]))


@both
def test_hessians_of_what_can_be_differentiated_twice(by: str) -> None:
    x = torch.randn(5, dtype=torch.float64)
    function = called("silu", by)
    for twice in (torch.func.hessian, lambda f: torch.func.jacfwd(torch.func.jacfwd(f))):
        found = twice(lambda v: function(v).sum())(x)
        expected = twice(lambda v: torch.nn.functional.silu(v).sum())(x)
        torch.testing.assert_close(found, expected)


def test_compiled_and_in_reverse_afterwards(name: str) -> None:
    product = registry().public(f"{name}_product")
    x, y = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def tangent(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda v: product(v, y, y), (x,), (t,))[1]

    t = torch.randn_like(x)
    compiled = torch.compile(tangent, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, t), 2 * x * y * y * t)
    with forward_ad.dual_level():  # a gradient inside of it
        found = torch.func.grad(lambda v: product(x, v, y).sum())(y)
    torch.testing.assert_close(found, x * x * y)


@both
def test_what_has_no_derivative_is_refused_by_name(name: str, by: str) -> None:
    x = torch.randn(3)
    product, backward = called(f"{name}_product", by), called(f"{name}_product_backward", by)
    message = rf"{name}_product: argument 'c': expected no tangent, .* by design; pass c.detach\(\)"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda c: product(x, x, c), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        product(x, x, forward_ad.make_dual(x, x))
    message = (
        rf"argument 'x': expected no tangent, .* take tangent_x in {name}_product_backward_jvp"
    )
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda v: backward(x, v, x, x), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        backward(x, forward_ad.make_dual(x, x), x, x)
    with pytest.raises(NotImplementedError, match=f"expected tangent_other from {name}_two_jvp"):
        torch.func.jvp(called(f"{name}_two", by), (x,), (x,))
    complex_ = torch.randn(3, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match=f"{name}_product"):
        torch.func.jvp(lambda v: product(v, x, x), (complex_,), (complex_,))


def test_the_kit_finds_a_wrong_one(name: str) -> None:
    check = by_name("jvp")

    def checked(op: str) -> Any:
        return check_op(op, checks=[check], devices=["cpu"], isolate=False)

    for right in (name, f"{name}_product", f"{name}_mix"):
        report = checked(right)
        assert report.entries[0].passed, report
    report = checked(f"{name}_wrong")
    numbers = re.fullmatch(
        r"'\w+': got d out\S* / d \w+\S* = (\S+), expected (\S+)", report.failures[0].detail
    )
    assert numbers is not None and float(numbers[1]) != float(numbers[2]), report
    (entry,) = checked(f"{name}_wrong_jvp").entries
    assert entry.passed is None and "no derivative in forward mode" in entry.detail


@pytest.mark.parametrize(
    ("jvp", "line", "text"),
    [
        ("(Tensor x) -> Tensor", "()->()", "expected an argument 'tangent_x', 'tangent_y', got"),
        ("(Tensor z) -> Tensor", "()->()", r"argument 'z' is unknown; allowed: inputs 'x', 'y'"),
        ("(Tensor tangent_x) -> Tensor tangent_z", "()->()", "return 'tangent_z' is unknown"),
        ("(Tensor tangent_x) -> Tensor", "(n)->()", r"argument 'tangent_x': expected \(\) as in"),
        ("(Tensor tangent_y) -> Tensor", "()->()", r"'tangent_y': expected none, as \.no_gradient"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_refused(jvp: str, line: str, text: str) -> None:
    op = pair(
        spec("f(Tensor x, Tensor y) -> Tensor", "(),()->()", no_gradient=("y",)),
        spec(f"f_jvp{jvp}", line),
    )
    with pytest.raises(ManifestError, match=f"cuda_ops::f_jvp: .*{text}"):
        forward_mode(op, None)


def test_what_writes_has_none() -> None:
    op = pair(
        spec("f(Tensor(a!) x) -> ()", "()->"), spec("f_jvp(Tensor tangent_x) -> Tensor", "()->()")
    )
    with pytest.raises(ManifestError, match="expected f to have a derivative of its own, got one"):
        forward_mode(op, None)


def test_without_a_rule_there_is_none() -> None:
    assert forward_mode(spec("f(Tensor x) -> Tensor", "(n)->()"), None) is None
