"""Arguments that an operator writes: ``Tensor(a!) x``, and what torch does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.registry import registry

SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
// residual += x, then x = residual * weight
void add_scale(const Tensor& x, const Tensor& residual, const Tensor& weight, double by) {
  write_elementwise_cpu(residual, [](double a, double b) { return a + b; }, residual, x);
  write_elementwise_cpu(
      x, [=](double a, double b) { return a * b * by; }, residual, weight);
}
Tensor counted(const Tensor& x) {
  Tensor before = elementwise_cpu([](double v) { return v; }, x);
  write_elementwise_cpu(x, [](double v) { return v + 1; }, x);
  return before;
}
void twice(const Tensor& x, const Tensor& out) {
  write_elementwise_cpu(out, [](double v) { return 2 * v; }, x);
}
void optional(const Tensor& x, const std::optional<Tensor>& sum) {
  if (sum) write_elementwise_cpu(*sum, [](double a, double b) { return a + b; }, *sum, x);
}
void add_each(const std::vector<Tensor>& xs, const std::vector<Tensor>& ys, double alpha) {
  for (size_t i = 0; i < xs.size(); ++i) {
    write_elementwise_cpu(
        xs[i], [=](double x, double y) { return x + alpha * y; }, xs[i], ys[i]);
  }
}
}
CUDA_OPS(library) {
  library.op("OP(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float by=1.0) -> ()",
             "(n),(n),[n]->").dtypes(kFloating).cpu<add_scale>();
  library.op("OP_counted(Tensor(a!) x) -> Tensor before", "()->()")
      .dtypes(kFloating).cpu<counted>();
  library.op("OP_twice(Tensor x, *, Tensor(a!) out) -> ()", "(),()->")
      .dtypes(kFloating).cpu<twice>();
  library.op("OP_optional(Tensor x, Tensor(a!)? sum=None) -> ()", "(),()->")
      .dtypes(kFloating).cpu<optional>();
  library.op("OP_each(Tensor(a!)[] xs, Tensor[] ys, float alpha) -> ()", "").cpu<add_each>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_written", scratch_root)
    source = SOURCE.replace('"OP(', '"scratch_written(').replace("OP_", "scratch_written_")
    with scratch.built(source):
        yield scratch.name


both = pytest.mark.parametrize("by", ["function", "dispatcher"])


def called(name: str, by: str) -> Callable[..., Any]:
    return registry().public(name) if by == "function" else getattr(torch.ops.cuda_ops, name)


def drawn(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(*shape), torch.randn(*shape), torch.randn(shape[-1])


def expected(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total * weight, total


@both
def test_what_is_declared_is_written_and_nothing_is_returned(name: str, by: str) -> None:
    x, residual, weight = drawn(4, 3)
    wanted = expected(x, residual, weight)
    assert called(name, by)(x, residual, weight) is None
    torch.testing.assert_close((x, residual), wanted)
    strided = torch.zeros(3, 8).t()[::2]
    strided.copy_(torch.randn(4, 3))
    wanted = expected(strided, residual, weight)
    called(name, by)(strided, residual, weight)
    torch.testing.assert_close((strided, residual), wanted)


@both
def test_a_lazily_negated_argument_is_read_and_written(name: str, by: str) -> None:
    stored, (x, y, weight) = torch.randn(3), drawn(3)
    negated = torch._neg_view(stored)
    wanted = negated + 1
    called(f"{name}_counted", by)(negated)
    torch.testing.assert_close(-stored, wanted)
    called(f"{name}_twice", by)(x, out=negated)
    torch.testing.assert_close(-stored, 2 * x)
    called(f"{name}_optional", by)(y, negated)
    torch.testing.assert_close(-stored, 2 * x + y)
    called(f"{name}_each", by)([negated, y.clone()], [weight, weight], 3.0)
    torch.testing.assert_close(-stored, 2 * x + y + 3 * weight)


@both
def test_there_may_be_results_too(name: str, by: str) -> None:
    x = torch.randn(3)
    before = called(f"{name}_counted", by)(x)
    assert torch.equal(before + 1, x)


@both
def test_a_keyword_may_say_where_the_result_goes(name: str, by: str) -> None:
    x, out = torch.randn(2, 3), torch.empty(2, 3)
    called(f"{name}_twice", by)(x, out=out)
    assert torch.equal(out, 2 * x)
    outs = torch.empty(2, 3)
    torch.vmap(lambda x, out: (called(f"{name}_twice", by)(x, out=out), out)[1])(x, outs)
    assert torch.equal(outs, 2 * x)


@both
def test_an_optional_one_may_be_missing(name: str, by: str) -> None:
    x, total = torch.ones(3), torch.ones(3)
    function = called(f"{name}_optional", by)
    function(x)
    function(x, total)
    assert torch.equal(total, torch.full((3,), 2.0))


@both
def test_lists_are_written(name: str, by: str) -> None:
    xs, ys = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.ones(3)]
    called(f"{name}_each", by)(xs, ys, 2.0)
    assert torch.equal(xs[0], torch.full((2,), 2.0)) and torch.equal(xs[1], torch.full((3,), 3.0))
    with pytest.raises(
        RuntimeError, match=r"'xs': expected memory of its own, .*, got some of 'xs'"
    ):
        called(f"{name}_each", by)([xs[0], xs[0]], [ys[0], ys[0]], 2.0)
    called(f"{name}_each", by)(xs, [xs[1][:2], xs[0][:1].expand(3)], 2.0)
    assert xs[0].tolist() == [8.0, 8.0] and xs[1].tolist() == [7.0, 7.0, 7.0]


@both
def test_memory_that_two_written_arguments_have_is_refused(name: str, by: str) -> None:
    function, (x, _, weight) = called(name, by), drawn(4, 3)
    with pytest.raises(
        RuntimeError, match=r"'x': expected memory of its own, .* got some of 'resi"
    ):
        function(x, x, weight)
    both = torch.randn(5, 3)
    with pytest.raises(
        RuntimeError, match=r"'x': expected memory of its own, .* got some of 'resi"
    ):
        function(both[:4], both[1:], weight)
    function(both[:2], both[2:4], weight)
    expanded = torch.randn(1, 3).expand(4, 3)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"'residual': expected a tensor whose elements share"
        ):
            function(x, expanded, weight)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(v) for v in (x, expanded, weight)]
            with pytest.raises(RuntimeError, match=r"'residual': expected a tensor whose elements"):
                function(*fakes)


@both
def test_what_lies_in_memory_that_is_written_is_read_first(name: str, by: str) -> None:
    function, (x, residual, _) = called(name, by), drawn(4, 3)
    expected, total = (x + residual) * x[1], x + residual
    function(x, residual, x[1])
    torch.testing.assert_close((x, residual), (expected, total))
    function(x, residual, residual[2])
    torch.testing.assert_close((x, residual), ((expected + total) * total[2], expected + total))


@both
def test_inductor_may_pass_one_memory_twice(name: str, by: str) -> None:
    function = called(f"{name}_optional", by)

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        total = x.clone()  # which Inductor removes, as nothing needs x after the call
        function(x, total)
        return total

    x = torch.randn(5)
    compiled = torch.compile(program, fullgraph=True, options={"fallback_by_default": True})
    torch.testing.assert_close(compiled(x), 2 * (x + 1))


@both
def test_what_is_written_has_all_loop_dims(name: str, by: str) -> None:
    function, (x, residual, weight) = called(name, by), drawn(4, 3)
    message = r"'x': expected dims '...' of \(..., n\) to be \[4\], as the operator writes it, got"
    with pytest.raises(RuntimeError, match=message):
        function(x[:1].clone(), residual, weight)
    first = x[:1].clone()
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=message):
        function(*(mode.from_tensor(v) for v in (first, residual, weight)))


@both
def test_a_gradient_is_refused_by_name(name: str, by: str) -> None:
    function, (x, residual, weight) = called(name, by), drawn(4, 3)
    for i, argument in enumerate(("x", "residual", "weight")):
        values = [x, residual, weight]
        values[i] = values[i].clone().requires_grad_()
        message = (
            f"'{argument}': expected a tensor that requires no gradient, .* 'x' and 'residual'"
        )
        with pytest.raises(RuntimeError, match=message):
            function(*values)
        with torch.no_grad():
            function(*values)


@both
def test_a_gradient_that_needs_the_values_before_raises(name: str, by: str) -> None:
    x, residual, weight = drawn(4, 3)
    factor = torch.randn(4, 3, requires_grad=True)
    product = factor * x  # its gradient needs x
    version = x._version
    called(name, by)(x, residual, weight)
    assert x._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@both
def test_inference_mode_writes(name: str, by: str) -> None:
    with torch.inference_mode():
        x, residual, weight = drawn(4, 3)
        wanted = expected(x, residual, weight)
        called(name, by)(x, residual, weight)
        torch.testing.assert_close((x, residual), wanted)


@both
@pytest.mark.parametrize("in_dims", [(0, 0, None), (1, -1, 0), (0, 0, 0)])
def test_vmap_writes_each_part(name: str, by: str, in_dims: tuple[Any, ...]) -> None:
    x, residual, weight = torch.randn(5, 5, 3), torch.randn(5, 5, 3), torch.randn(5, 3)
    if in_dims[1] == -1:
        residual = residual.movedim(0, -1)
    weights = weight if in_dims[2] == 0 else weight[0]
    parts = [
        [
            v.select(d, i).clone() if d is not None else v
            for v, d in zip((x, residual, weights), in_dims, strict=True)
        ]
        for i in range(5)
    ]
    function = called(name, by)
    torch.vmap(lambda *args: (function(*args), args[0])[1], in_dims=in_dims)(x, residual, weights)
    for i, part in enumerate(parts):
        registry().public(name)(*part)
        torch.testing.assert_close(x.select(in_dims[0], i), part[0])
        torch.testing.assert_close(residual.select(in_dims[1], i), part[1])


def test_vmap_refuses_to_write_all_parts_to_one_tensor(name: str) -> None:
    x, residual, weight = drawn(4, 3)
    with pytest.raises(
        RuntimeError, match=r"'residual': expected a tensor that torch.vmap maps like"
    ):
        torch.vmap(registry().public(name), in_dims=(0, None, None))(x, residual[0], weight)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):  # torch's own
        torch.vmap(torch.Tensor.add_, in_dims=(None, 0))(x[0], residual)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_it_compiles(name: str, backend: str) -> None:
    torch._dynamo.reset()
    function = registry().public(name)

    def step(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x * 2
        function(x, residual, weight)
        return x + 1

    x, residual, weight = drawn(4, 3)
    wanted = expected(2 * x, residual, weight)
    got = torch.compile(step, fullgraph=True, backend=backend)(x, residual, weight)
    torch.testing.assert_close((got - 1, residual), wanted)


def test_inductor_copies_nothing_that_it_can_write_in_place(name: str) -> None:
    torch._dynamo.reset()
    from torch._inductor.utils import run_and_get_code

    function = registry().public(name)

    def step(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        function(y, residual, weight)
        return y

    x, residual, weight = drawn(4, 3)
    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, residual, weight)
    assert f"{name}.default(" in code
    assert "copy_" not in code.replace("copy_misaligned", "") and "clone" not in code


def test_shards_are_written_where_they_are(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    x, residual, weight = drawn(4, 3)
    wanted = expected(x, residual, weight)
    shards = [DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in (x, residual)]
    whole = DTensor.from_local(weight, mesh, [Replicate()])
    with CommDebugMode() as communication:
        registry().public(name)(*shards, whole)
    assert communication.get_total_counts() == 0
    torch.testing.assert_close((x, residual), wanted)

    shards[1] = DTensor.from_local(residual, mesh, [Partial()], run_check=False)
    shards[0] = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    with pytest.raises(RuntimeError, match=r"'x': expected placement .*as it is written"):
        registry().public(name)(*shards, whole)


def test_tangents_are_refused_by_name(name: str) -> None:
    x, residual, weight = drawn(4, 3)
    for function in (called(name, "function"), called(name, "dispatcher")):

        def written(v: torch.Tensor, function: Callable[..., Any] = function) -> torch.Tensor:
            y = v * 1
            function(y, residual.clone(), weight)
            return y

        with pytest.raises(NotImplementedError, match=r"argument 'x': expected no tangent"):
            torch.func.jvp(written, (x,), (x,))
