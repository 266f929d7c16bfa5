"""Words of a binding that meet in one operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from specs import spec
from torch.autograd import forward_ad

from cuda_ops.compile_ops import compile_ops, reload
from cuda_ops.dispatch.library import parsed_schema
from cuda_ops.dispatch.words import words_of
from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import by_name

SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
#include "random_binding.h"
using namespace cuda_ops;
namespace {
enum class Side { kBoth, kUp };
Tensor drawn(const Tensor& key, const Tensor& like, double from) {
  return random_cpu([](const Draw& draw, double, double from) { return draw.uniform() + from; },
                    key, like, from);
}
std::tuple<Tensor, Tensor> jittered(const Tensor& x, const Tensor& key, Side side) {
  const Tensor factor = drawn(key, x, side == Side::kUp ? 1 : 0.5);
  return {elementwise_cpu([](double v, double f) { return v * f; }, x, factor), factor};
}
Tensor jittered_backward(const Tensor& grad_out, const Tensor& factor) {
  return elementwise_cpu([](double g, double f) { return g * f; }, grad_out, factor);
}
void jitter_(const Tensor& x, const Tensor& y, const Tensor& key) {
  write_elementwise_cpu(x, [](double a, double b, double f) { return a + b * f; }, x, y,
                        drawn(key, y, 0.5));
}
void jitter_each_(const std::vector<Tensor>& xs, const Tensor& y, const Tensor& key) {
  for (const Tensor& x : xs) jitter_(x, y, key);
}
Tensor first_sum(const Tensor& x, const std::vector<Tensor>& xs) {
  return elementwise_cpu([](double a, double b) { return a + b; }, x, xs[0]);
}
std::tuple<Tensor, Tensor> zeros(int64_t n, const std::optional<Device>& device) {
  Tensor out = empty({n}, DType::kFloat32, device), other = empty({n}, DType::kFloat32, device);
  for (const Tensor& t : {out, other}) std::fill_n(static_cast<float*>(t.mutable_data_ptr()), n, 0);
  return {out, other};
}
}
CUDA_OPS(library) {
  library.op("OP(Tensor x, Tensor key, str side=\\"both\\") -> (Tensor out, Tensor factor)",
             "(),[2]->(),()")
      .dtypes(kFloating).random("key").hidden("factor").one_of("side", {"both", "up"})
      .cpu<jittered>();
  library.op("OP_backward(Tensor grad_out, Tensor factor) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating).cpu<jittered_backward>();
  library.op("OP_add_(Tensor(a!) x, Tensor y, Tensor key) -> ()", "(),(),[2]->")
      .dtypes(kFloating).random("key").broadcast().cpu<jitter_>();
  library.op("OP_each_(Tensor(a!)[] xs, Tensor y, Tensor key) -> ()", "(),[2]->")
      .dtypes(kFloating).random("key").cpu<jitter_each_>();
  library.op("OP_first(Tensor x, Tensor[] xs) -> Tensor", "").linear("x").cpu<first_sum>();
  library.op("OP_zeros(int n, *, Device? device=None) -> (Tensor out, Tensor other)",
             "->(n),(n)")
      .returns("out", DType::kFloat32).returns("other", DType::kFloat32)
      .hidden("other").nondeterministic("cpu").cpu<zeros>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_together", scratch_root)
    with scratch.built(SOURCE.replace('"OP', f'"{scratch.name}')):
        yield scratch.name


def test_the_kit_passes_what_is_random_and_hidden(name: str) -> None:
    checks = [by_name(check) for check in ("public", "draws", "jvp", "vmap", "compile_static")]
    report = check_op(name, checks=checks, devices=["cpu"], isolate=False)
    assert report.passed, report


def test_the_kit_passes_what_is_random_and_written(name: str) -> None:
    checks = [by_name(check) for check in ("written", "draws", "vmap", "compile_static")]
    report = check_op(f"{name}_add_", checks=checks, devices=["cpu"], isolate=False)
    assert report.passed, report


def test_a_list_that_is_written_is_mapped(name: str) -> None:
    each, y, key = registry().public(f"{name}_each_"), torch.randn(4, 3), torch.tensor([1, 2])
    xs = [torch.zeros(4, 3), torch.zeros(4, 3)]

    def called(x: torch.Tensor, other: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each([x, other], y, key=key)
        return x

    torch.vmap(called)(xs[0], xs[1], y)
    for row in range(4):
        expected = torch.zeros(3)
        each([expected], y[row], key=key)
        assert torch.equal(xs[0][row], expected) and torch.equal(xs[1][row], expected)
    message = r"'xs': expected a tensor that torch.vmap maps like 'y' and 'xs', as the operator"
    with pytest.raises(RuntimeError, match=message):
        torch.vmap(called, in_dims=(0, None, 0))(xs[0], xs[1][0], y)


def test_what_is_written_may_be_mapped_further_out(name: str) -> None:
    add_, y, key = registry().public(f"{name}_add_"), torch.randn(2, 3), torch.tensor([1, 2])
    x, wanted = torch.zeros(2, 3), torch.zeros(2, 3)

    def row(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda v: (add_(x, y, key=key), v)[1])(torch.zeros(5))

    torch.vmap(row)(x, y)
    torch.vmap(lambda x, y: (add_(x, y, key=key), x)[1])(wanted, y)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_functionalize_writes_in_every_mode(name: str, mode: Any) -> None:
    add_, key = registry().public(f"{name}_add_"), torch.tensor([1, 2])
    with mode():
        x, y, wanted = torch.zeros(3), torch.randn(3), torch.zeros(3)
        add_(wanted, y, key=key)
        torch.func.functionalize(lambda x, y: (add_(x, y, key=key), x)[1])(x, y)
        assert torch.equal(x, wanted)


def test_no_tangent_of_what_writes_is_dropped(name: str) -> None:
    add_, x, y = registry().public(f"{name}_add_"), torch.randn(3), torch.randn(3)

    def written(v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(3)
        add_(out, v)
        return out

    message = r"'y': expected no tangent, as the operator writes 'x'; pass y.detach\(\)$"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(written, (y,), (x,))
    with pytest.raises(NotImplementedError, match=message), forward_ad.dual_level():
        written(forward_ad.make_dual(y, x))
    (_, tangent) = torch.func.jvp(lambda v: v + written(v.detach()), (y,), (x,))
    assert torch.equal(tangent, x)


@pytest.mark.parametrize("side", ["both", "up"])
def test_the_tangent_of_a_random_result_has_the_same_numbers(name: str, side: str) -> None:
    jittered, key, t = registry().public(name), torch.tensor([1, 2]), torch.randn(3)
    out, tangent = torch.func.jvp(lambda x: jittered(x, side, key=key), (torch.ones(3),), (t,))
    torch.testing.assert_close(tangent, out * t)


def test_tangents_beside_a_list_and_in_it(name: str) -> None:
    first, x, t = registry().public(f"{name}_first"), torch.randn(3), torch.randn(3)
    (_, tangent) = torch.func.jvp(lambda v: first(v, [torch.zeros(3)]), (x,), (t,))
    assert torch.equal(tangent, t)
    message = "'xs': expected no tangent, as a list of tensors has no derivative in forward mode"
    for function in (lambda v: first(x, [x, v]), lambda v: first(v, [v])):
        with pytest.raises(NotImplementedError, match=message):
            torch.func.jvp(function, (x,), (t,))


def test_without_a_tensor_argument(name: str) -> None:
    function = registry().public(f"{name}_zeros")
    devices: tuple[Any, ...] = (None, "cpu", torch.device("cpu"))
    for device in devices:
        assert torch.equal(function(3, device=device), torch.zeros(3))
    torch.use_deterministic_algorithms(True)
    try:
        for one in (function, getattr(torch.ops.cuda_ops, f"{name}_zeros")):
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                one(3)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("argument", ["mode", "dispatch_key"])
def test_what_writes_is_compiled_with_keywords(argument: str) -> None:
    parsed_schema(f"op(Tensor x, int {argument}) -> Tensor", "op", (), False)
    with pytest.raises(ManifestError, match=f"'{argument}': expected another name, as torch"):
        parsed_schema(f"op(Tensor(a!) x, int {argument}) -> ()", "op", (), False)


@pytest.mark.parametrize("schema", ["op(Tensor[] x) -> Tensor", "op(Tensor(a!) x) -> ()"])
def test_no_derivative_is_declared_that_there_cannot_be(schema: str) -> None:
    words = ("hidden", "no_gradient", "tags", "nondeterministic")
    entry = {**dict.fromkeys(words, ()), "linear": ["x"], "broadcast": False}
    with pytest.raises(ManifestError, match=r"expected nothing, which \.linear may name"):
        words_of("op", entry, spec(schema, "").parsed, None, False)


def test_a_reload_changes_the_docstring_alone(scratch_op: ScratchOp) -> None:
    scratch_op.write()
    (row,) = compile_ops([scratch_op.name])
    assert not row.error, row.error
    function = registry().public(scratch_op.name)
    text = scratch_op.binding.read_text()
    assert function.__doc__ != "Another text." and ".cpu<forward>()" in text
    scratch_op.binding.write_text(
        text.replace(".cpu<forward>()", '.doc("Another text.").cpu<forward>()')
    )
    reload(scratch_op.name)
    assert function.__doc__ == "Another text."
