"""A pair whose weight has no loop dims: ``(n),[n]->(n)``, and a gradient summed over all rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from torch._subclasses import FakeTensorMode

from cuda_ops import derive
from cuda_ops.dev import compile_ops
from cuda_ops.registry import registry
from cuda_ops.spec import OpSpec
from cuda_ops.testing import check_op

SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
std::vector<int64_t> shape_of(const Tensor& g, const Tensor& x) {
  return detail::broadcast_shape("OP", {View(g), View(x)});
}
Tensor forward(const Tensor& x, const Tensor& weight) {
  Tensor out = empty(shape_of(x, x), x);
  map_cpu(strided(out, x, weight), [](double v, double w) { return v * w; });
  return out;
}
std::tuple<Tensor, Tensor> backward(const Tensor& g, const Tensor& x, const Tensor& weight) {
  const std::vector<int64_t> shape = shape_of(g, x);
  Tensor grad_x = empty(shape, x), rows = empty(shape, x), grads = empty(shape, x);
  map_cpu(strided(grad_x, g, x, weight), [](double a, double, double w) { return a * w; });
  map_cpu(strided(rows, x), [](double v) { return v; });
  map_cpu(strided(grads, g), [](double v) { return v; });
  const int64_t n = weight.size(0);
  Tensor grad_weight = empty({n}, x);
  visit_floating_cpu(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    const T* a = static_cast<const T*>(grads.data_ptr());
    const T* b = static_cast<const T*>(rows.data_ptr());
    for (int64_t k = 0; k < n; ++k) {
      double sum = 0;
      for (int64_t i = k; i < rows.numel(); i += n) {
        sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
      }
      static_cast<T*>(grad_weight.mutable_data_ptr())[k] = static_cast<T>(sum);
    }
  });
  return {std::move(grad_x), std::move(grad_weight)};
}
}
CUDA_OPS(library) {
  library.op("OP(Tensor x, Tensor weight) -> Tensor", "(n),[n]->(n)")
      .dtypes(kFloating).cpu<forward>();
  library.op("OP_backward(Tensor grad_out, Tensor x, Tensor weight)"
             " -> (Tensor grad_x, Tensor grad_weight)", "(n),(n),[n]->(n),[n]")
      .dtypes(kFloating).cpu<backward>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    op = ScratchOp("scratch_brackets", scratch_root)
    op.binding.write_text(SOURCE.replace("OP(", f"{op.name}(").replace("OP_b", f"{op.name}_b"))
    (row,) = compile_ops([op.name])
    assert not row.error, row.error
    yield op.name
    op.binding.unlink()
    registry().rescan()


def spec(name: str) -> OpSpec:
    return registry().operators("scratch_brackets")[name].spec


def test_it_passes_its_checks(name: str) -> None:
    for op in (name, f"{name}_backward"):
        report = check_op(op, devices=["cpu"])
        assert report.passed, str(report)
        ran = {entry.name for entry in report.entries if entry.passed}
        assert {"vmap[cpu]", "dtensor[cpu]", "opcheck[cpu]", "compile_dynamic[cpu]"} <= ran


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


def test_the_gradient_of_each_sample(name: str) -> None:
    function, x, weight = registry().public(name), torch.randn(5, 4, 3), torch.randn(3)

    def gradients(f: Any) -> Any:
        loss = torch.func.grad(lambda w, v: f(v, w).square().sum())
        return torch.func.vmap(loss, (None, 0))(weight, x)

    torch.testing.assert_close(gradients(function), gradients(torch.mul))


def test_shards_of_rows_give_partial_sums(name: str) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, weight = torch.empty(4, 5, 3), torch.empty(3)
    rule = derive.cuda_ops_sharding(spec(name))
    assert rule is not None
    assert ([Shard(1)], [Shard(1), Replicate()]) in rule(x, weight)
    rule = derive.cuda_ops_sharding(spec(f"{name}_backward"))
    assert rule is not None
    rows = [Shard(1), Shard(1), Replicate()]
    assert ([Shard(1), Partial()], rows) in rule(x, x, weight)


def test_the_weight_is_counted_once(name: str) -> None:
    cases = derive.cuda_ops_benchmarks(spec(name)) or []
    (case,) = (case for case in cases if case.label == "4096x1024 float32")
    assert case.bytes == 4 * (2 * 4096 * 1024 + 1024)
    x, weight = case.make_inputs(torch.device("cpu"))
    assert (x.shape, weight.shape) == ((4096, 1024), (1024,))
