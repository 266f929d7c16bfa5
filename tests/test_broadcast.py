"""``.broadcast()``: kernels get all tensors with the loop dims of the result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ScratchOp
from specs import spec

from cuda_ops.dispatch.words import words_of
from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.signature import parse_signature
from cuda_ops.testing import check_op

# The CPU kernels refuse tensors that are not expanded; seen returns the strides.
SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
void same(const Tensor& a, const Tensor& b) {
  if (shape_of(a) != shape_of(b)) refuse("a", shape_name(View(a)), shape_name(View(b)));
}
Tensor product(const Tensor& x, const Tensor& y, const Tensor& weight) {
  same(x, y);
  if (weight.dim() != 1) refuse("weight", "one dim", shape_name(View(weight)));
  return elementwise_cpu([](double a, double b, double c) { return a * b * c; }, x, y, weight);
}
std::tuple<Tensor, Tensor> product_backward(const Tensor& grad_out, const Tensor& x,
                                            const Tensor& y, const Tensor& weight) {
  same(grad_out, x);
  same(grad_out, y);
  const auto times = [](double a, double b, double c) { return a * b * c; };
  return {elementwise_cpu(times, grad_out, y, weight), elementwise_cpu(times, grad_out, x, weight)};
}
Tensor strides(const Tensor& x, const std::optional<Tensor>&) {
  Tensor out = empty(shape_of(x), x);
  std::fill_n(static_cast<double*>(out.mutable_data_ptr()), out.numel(), x.stride(0));
  return out;
}
void store(const Tensor& x, const Tensor& out) {
  same(x, out);
  write_elementwise_cpu(out, [](double v) { return v; }, x);
}
}
CUDA_OPS(library) {
  library.op("OP(Tensor x, Tensor y, Tensor weight) -> Tensor", "(n),(n),[n]->(n)")
      .dtypes(kFloating).broadcast().cpu<product>();
  library.op("OP_backward(Tensor grad_out, Tensor x, Tensor y, Tensor weight) -> (Tensor grad_x, "
             "Tensor grad_y)", "(n),(n),(n),[n]->(n),(n)")
      .dtypes(kFloating).broadcast().cpu<product_backward>();
  library.op("OP_strides(Tensor x, Tensor? y=None) -> Tensor", "(),()->()")
      .dtypes("x", DType::kFloat64).dtypes("y", DType::kFloat64).broadcast().cpu<strides>();
  library.op("OP_store(Tensor x, Tensor(a!) out) -> ()", "(n),(n)->").dtypes(kFloating).broadcast()
      .cpu<store>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_broadcast", scratch_root)
    with scratch.built(SOURCE.replace('"OP', f'"{scratch.name}')):
        yield scratch.name


@pytest.mark.parametrize(
    ("of_x", "of_y"),
    [((4, 3), (4, 3)), ((3,), (4, 3)), ((2, 1, 3), (4, 3)), ((1, 3), (5, 2, 3)), ((0, 3), (3,))],
)
def test_forward_and_backward(name: str, of_x: tuple[int, ...], of_y: tuple[int, ...]) -> None:
    function, weight = registry().public(name), torch.randn(3, dtype=torch.float64)
    x, y = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (of_x, of_y))
    out, expected = function(x, y, weight), x * y * weight
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, y), grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (x, y), grad))


def test_what_fits_is_passed_as_it_is(name: str) -> None:
    strides = registry().public(f"{name}_strides")
    x, y = torch.randn(6, dtype=torch.float64)[::2], torch.randn(1, dtype=torch.float64)
    assert strides(x).tolist() == strides(x, y).tolist() == [2.0] * 3
    assert strides(y, x).tolist() == [0.0] * 3


def test_what_is_written_gets_the_expanded_argument(name: str) -> None:
    out, x = torch.zeros(4, 3), torch.randn(3)
    registry().public(f"{name}_store")(x, out)
    assert torch.equal(out, x.expand(4, 3))
    with pytest.raises(RuntimeError, match=r"'out': expected dims '...' of \(..., n\) to be \[4\]"):
        registry().public(f"{name}_store")(out, torch.zeros(3))


def test_the_kit_passes_it(name: str) -> None:
    report = check_op(name, devices=["cpu"], isolate=False)
    assert report.passed, str(report)


def test_only_where_loop_dims_broadcast() -> None:
    empty = dict.fromkeys(("hidden", "no_gradient", "linear", "tags", "nondeterministic"), ())
    parsed = spec("f(Tensor x, Tensor y) -> Tensor", "").parsed
    for line, composed in (("", False), ("(n),[n]->(n)", False), ("(n),(n)->(n)", True)):
        entry = {**empty, "broadcast": True, "signature": line}
        signature = parse_signature(line) if line else None
        with pytest.raises(ManifestError, match=r"cuda_ops::f: \.broadcast: expected an operator"):
            words_of("cuda_ops::f", entry, parsed, signature, composed)
