"""A pair whose weight has no loop dims: ``(n),[n]->(n)``, and a gradient summed over all rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from torch._subclasses import FakeTensorMode

from cuda_ops.benchmarking import derived as benchmarking_derived
from cuda_ops.compile_ops import compile_ops
from cuda_ops.derive import rules
from cuda_ops.registry import registry
from cuda_ops.spec import OpSpec
from cuda_ops.testing import check_op
from cuda_ops.testing.case import Case, NotRunError
from cuda_ops.testing.checks import by_name, index_width
from cuda_ops.testing.subject import find
from cuda_ops.testing.worker import Worker

pytestmark = pytest.mark.slow  # they need an operator of their own to be compiled

SOURCE = """
#include "binding.h"
using namespace cuda_ops;
namespace {
template <class... Tensors>
std::vector<int64_t> shape_of(const Tensors&... tensors) {
  return broadcast_shape({View(tensors)...});
}
Tensor dense(const Tensor& x, const std::vector<int64_t>& shape) {
  Tensor out = empty(shape, x);
  map_cpu(strided(out, x), [](double v) { return v; });
  return out;
}
// The sums over rows of n of f(a, b), whose shapes broadcast.
template <class F>
Tensor sums(const Tensor& a, const Tensor& b, int64_t n, std::vector<int64_t> shape, const F& f) {
  const Tensor left = dense(a, shape_of(a, b)), right = dense(b, shape_of(a, b));
  Tensor out = empty(shape, a);
  visit_floating_cpu(dtype_of(a), [&](auto tag) {
    using T = decltype(tag);
    const T* l = static_cast<const T*>(left.data_ptr());
    const T* r = static_cast<const T*>(right.data_ptr());
    for (int64_t k = 0; k < n; ++k) {
      double sum = 0;
      for (int64_t i = k; i < left.numel(); i += n) sum += f(l[i], r[i]);
      static_cast<T*>(out.mutable_data_ptr())[k] = static_cast<T>(sum);
    }
  });
  return out;
}
Tensor forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  Tensor out = empty(shape_of(x), x);
  if (bias) {
    map_cpu(strided(out, x, weight, *bias), [](double v, double w, double b) { return v * w + b; });
  } else {
    map_cpu(strided(out, x, weight), [](double v, double w) { return v * w; });
  }
  return out;
}
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& g, const Tensor& x,
                                            const Tensor& weight) {
  Tensor grad_x = empty(shape_of(g, x), x);
  map_cpu(strided(grad_x, g, weight), [](double a, double w) { return a * w; });
  const int64_t n = weight.size(0);
  return {std::move(grad_x), sums(g, x, n, {n}, [](double a, double v) { return a * v; }),
          sums(g, x, n, {n}, [](double a, double) { return a; })};
}
Tensor loss(const Tensor& x, const Tensor& y) {
  const double count = static_cast<double>(dense(x, shape_of(x, y)).numel());
  return sums(x, y, 1, {}, [&](double a, double b) { return a * b / count; });
}
std::tuple<Tensor, Tensor> loss_backward(const Tensor& g, const Tensor& x, const Tensor& y) {
  Tensor grad_x = empty(shape_of(x, y), x), grad_y = empty(shape_of(x, y), x);
  const double count = static_cast<double>(grad_x.numel());
  const auto along = [=](double a, double v) { return a * v / count; };
  map_cpu(strided(grad_x, g, y), along);
  map_cpu(strided(grad_y, g, x), along);
  return {std::move(grad_x), std::move(grad_y)};
}
}
CUDA_OPS(library) {
  library.op("OP(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", "(n),[n],[n]->(n)")
      .dtypes(kFloating).cpu<forward>();
  library.op("OP_backward(Tensor grad_out, Tensor x, Tensor weight)"
             " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
             "(n),(n),[n]->(n),[n],[n]").dtypes(kFloating).cpu<backward>();
  library.op("OP_loss(Tensor x, Tensor y) -> Tensor", "(),()->[]").dtypes(kFloating).cpu<loss>();
  library.op("OP_loss_backward(Tensor grad_out, Tensor x, Tensor y)"
             " -> (Tensor grad_x, Tensor grad_y)", "[],(),()->(),()")
      .dtypes(kFloating).cpu<loss_backward>();
}
"""


def load(root: Path, name: str, source: str = SOURCE) -> None:
    text = source.replace("OP(", f"{name}(").replace("OP_", f"{name}_")
    ScratchOp(name, root).binding.write_text(text)
    (row,) = compile_ops([name])
    assert not row.error, row.error


@pytest.fixture(scope="module")
def name(scratch_root: Path, quick_compiler: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CXX", str(quick_compiler))
        load(scratch_root, "scratch_brackets")
    yield "scratch_brackets"
    ScratchOp("scratch_brackets", scratch_root).binding.unlink()
    registry().rescan()


def spec(name: str) -> OpSpec:
    return registry().operators("scratch_brackets")[name].spec


def test_it_passes_its_checks(name: str, worker: Worker) -> None:
    for op in registry().operators(name):
        report = check_op(op, devices=["cpu"], isolate=worker)
        assert report.passed, str(report)
        ran = {entry.name for entry in report.entries if entry.passed}
        wanted = {"vmap[cpu]", "dtensor[cpu]", "opcheck[cpu]", "compile_static[cpu]"}
        if "_loss" in op:
            wanted.remove("dtensor[cpu]")  # the rules of a mean and of its gradient shard nothing
        assert wanted <= ran, op


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((2, 3), (2, 3), "'weight': expected exactly the dims [n], got shape [2, 3]"),
        ((2, 3), (), "'weight': expected exactly the dims [n], got shape []"),
        ((2, 3), (1,), "'weight': expected dim 'n' of [n] to be 3, got shape [1]"),
        ((), (3,), "'x': expected at least 1 dims (..., n), got shape []"),
    ],
)
def test_dims_are_refused_in_the_same_words(
    name: str, x: tuple[int, ...], weight: tuple[int, ...], message: str
) -> None:
    function, expected = registry().public(name), rf"argument {re.escape(message)}$"
    with pytest.raises(RuntimeError, match=expected):
        function(torch.ones(x), torch.ones(weight))
    with FakeTensorMode(), pytest.raises(RuntimeError, match=expected):
        function(torch.ones(x), torch.ones(weight))


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 1), (2, None)])
@pytest.mark.parametrize("count", [0, 2])
def test_vmap_over_either(name: str, in_dims: tuple[int | None, ...], count: int) -> None:
    parts = [torch.randn(4, 3), torch.randn(3)]
    given = [
        part if dim is None else torch.stack([part, -part], dim).narrow(dim, 0, count)
        for part, dim in zip(parts, in_dims, strict=True)
    ]
    function = registry().public(name)
    expected = torch.vmap(torch.mul, in_dims)(*given)
    torch.testing.assert_close(torch.vmap(function, in_dims)(*given), expected)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("sum += f(l[i], r[i])", "sum = f(l[i], r[i])"),  # one row's, not the sum of all
        ("return v * w; }", "return 2 * v * w; }"),  # without a bias alone
    ],
)
def test_a_gradient_that_some_rows_alone_show_to_be_wrong_is_found(
    right: str, wrong: str, scratch_op: ScratchOp, worker: Worker
) -> None:
    assert SOURCE.count(right) == 1
    load(scratch_op.root, scratch_op.name, SOURCE.replace(right, wrong))
    gradcheck = [by_name("gradcheck")]
    report = check_op(scratch_op.name, checks=gradcheck, devices=["cpu"], isolate=worker)
    assert [entry.name for entry in report.failures] == ["gradcheck[cpu]"], str(report)


def test_an_optional_one_may_be_left_out(name: str) -> None:
    function = registry().public(name)
    x, weight, bias = torch.randn(4, 3), torch.randn(3), torch.randn(3)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    for given in (leaves, leaves[:2]):
        expected = torch.addcmul(bias if len(given) > 2 else torch.zeros(3), x, weight)
        torch.testing.assert_close(function(*given), expected)
        actual = torch.autograd.grad(function(*given).square().sum(), given)
        assert_close = torch.testing.assert_close
        assert_close(actual, torch.autograd.grad(expected.square().sum(), given))


def test_a_mean_over_all_rows_is_not_one_of_some(name: str) -> None:
    loss = registry().public(f"{name}_loss")
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    for cotangent in (torch.tensor(2.0), torch.randn(5)):
        each = torch.func.vmap(
            lambda v, w, g: torch.func.vjp(loss, v, w)[1](g), (0, 0, 0 if cotangent.dim() else None)
        )
        expected = cotangent.expand(5).unsqueeze(1) / 4
        torch.testing.assert_close(each(x, y, cotangent), (y * expected, x * expected))
    replicated = rules.cuda_ops_sharding(spec(f"{name}_loss_backward"))
    assert replicated is not None and len(replicated(torch.ones(()), x, y)) == 1


def test_many_elements_are_many_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    many_elements = by_name("many_elements").body
    monkeypatch.setattr(index_width, "_INT32", 2**20)
    monkeypatch.setattr(index_width, "much_memory", lambda device, needed: nullcontext())
    cases = [
        Case(find(op), "cpu", index_width._block(spec(op))[0]) for op in (name, f"{name}_backward")
    ]
    many_elements(cases[0])
    with pytest.raises(NotRunError, match="no common outermost dim"):
        many_elements(cases[1])


def test_the_gradient_of_each_sample(name: str) -> None:
    function, x, weight = registry().public(name), torch.randn(5, 4, 3), torch.randn(3)

    def gradients(f: Any) -> Any:
        loss = torch.func.grad(lambda w, v: f(v, w).square().sum())
        return torch.func.vmap(loss, (None, 0))(weight, x)

    torch.testing.assert_close(gradients(function), gradients(torch.mul))


def test_shards_of_rows_give_partial_sums(name: str) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, weight = torch.empty(4, 5, 3), torch.empty(3)
    rule = rules.cuda_ops_sharding(spec(name))
    assert rule is not None
    assert ([Shard(1)], [Shard(1), Replicate()]) in rule(x, weight)
    rule = rules.cuda_ops_sharding(spec(f"{name}_backward"))
    assert rule is not None
    rows = [Shard(1), Shard(1), Replicate()]
    assert ([Shard(1), Partial(), Partial()], rows) in rule(x, x, weight)


def test_what_serves_all_rows_is_counted_once(name: str) -> None:
    cases = benchmarking_derived.cuda_ops_benchmarks(spec(name)) or []
    (case,) = (case for case in cases if case.label == "4096x1024 float32")
    assert case.bytes == 4 * (2 * 4096 * 1024 + 2 * 1024)
    x, weight, _ = case.make_inputs(torch.device("cpu"))
    assert (x.shape, weight.shape) == ((4096, 1024), (1024,))
