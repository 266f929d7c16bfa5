"""Types of arguments and results beside tensors and numbers: names, devices, lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from hypothesis import given, settings
from test_library import entry, validated
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.errors import BuildError, ManifestError
from cuda_ops.registry import registry
from cuda_ops.spec import OpSpec
from cuda_ops.testing import check_op, samples, sizes

SOURCE = r"""
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
enum class Mode { kMean, kSum, kNone };

double factor(Mode mode) { return mode == Mode::kMean ? 1 : mode == Mode::kSum ? 2 : 3; }
Tensor scaled(const Tensor& x, double by) {
  return elementwise_cpu([=](double v) { return by * v; }, x);
}
Tensor forward(const Tensor& x, Mode mode) { return scaled(x, factor(mode)); }
Tensor backward(const Tensor& grad_out, Mode mode) { return scaled(grad_out, factor(mode)); }
Tensor maybe(const Tensor& x, std::optional<Mode> mode) {
  return scaled(x, mode ? factor(*mode) : 0);
}
Tensor texts(const Tensor& x, const std::string& name, const std::optional<std::string>& other) {
  return scaled(x, double(name.size()) + (other ? 0.5 * double(other->size()) : 0));
}
Tensor placed(const Tensor& x, Device device, std::optional<Device> other) {
  return scaled(x, device_of(device) == device_of(x) ? other ? 2 : 1 : 0);
}
Tensor lists(const Tensor& x, const std::vector<std::optional<Tensor>>& tensors,
             const std::vector<bool>& flags, const std::optional<std::vector<int64_t>>& ints,
             const std::optional<std::vector<double>>& floats) {
  double sum = 0;
  for (const bool flag : flags) sum += flag;
  for (const int64_t i : ints.value_or(std::vector<int64_t>{})) sum += double(i);
  for (const double v : floats.value_or(std::vector<double>{})) sum += v;
  for (const auto& tensor : tensors) sum += tensor ? 100 * double(tensor->dim()) : 1000;
  return scaled(x, sum);
}
std::vector<Tensor> parts(const Tensor& x) { return {scaled(x, 1), scaled(x, 2)}; }
std::tuple<Tensor, int64_t> numbers(const Tensor& x) { return {scaled(x, 1), x.dim()}; }
}
CUDA_OPS(library) {
  library.op("scaled_by(Tensor x, str mode=\"mean\") -> Tensor", "()->()")
      .dtypes(kFloating)
      .one_of("mode", {"mean", "sum", "none"})
      .cpu<forward>();
  library.op("scaled_by_backward(Tensor grad_out, str mode) -> Tensor grad_x", "()->()")
      .dtypes(kFloating).one_of("mode", {"mean", "sum", "none"}).cpu<backward>();
  library.op("scaled_by_maybe(Tensor x, *, str? mode=None) -> Tensor", "()->()")
      .dtypes(kFloating).one_of("mode", {"mean", "sum", "none"}).cpu<maybe>();
  library.op("scaled_by_texts(Tensor x, str name, str? other=None) -> Tensor", "()->()")
      .dtypes(kFloating).one_of("other", {"a", "bb"}).cpu<texts>();
  library.op("scaled_by_placed(Tensor x, Device device, Device? other=None) -> Tensor", "()->()")
      .dtypes(kFloating).cpu<placed>();
  library.op("scaled_by_lists(Tensor x, Tensor?[] tensors, bool[] flags, int[]? ints=None, "
             "float[]? floats=None) -> Tensor", "()->()").dtypes(kFloating).cpu<lists>();
  library.op("scaled_by_parts(Tensor x) -> Tensor[]", "").dtypes(kFloating).cpu<parts>();
  library.op("scaled_by_numbers(Tensor x) -> (Tensor out, int dims)", "")
      .dtypes(kFloating).cpu<numbers>();
}
"""

PLUGIN = """
import torch
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd

@hookimpl
def cuda_ops_fake(op):
    if op.name == "scaled_by_parts":
        return lambda x: [torch.empty_like(x), torch.empty_like(x)]
    if op.name == "scaled_by_numbers":
        return lambda x: (torch.empty_like(x), x.dim())

@hookimpl
def cuda_ops_autograd(op):
    if op.name == "scaled_by_parts":
        def both(ctx, grads):
            return grads[0] + 2 * grads[1]
        return Autograd(lambda ctx, inputs, output: None, both)
    if op.name == "scaled_by_lists":  # of the sum of 100 for each dim of each tensor
        def setup(ctx, inputs, output):
            ctx.count = len(inputs[1])
        def backward(ctx, grad):
            rest = [None] * (len(ctx.needs_input_grad) - 2)
            return (grad, [grad] * ctx.count, *rest)
        return Autograd(setup, backward)

@hookimpl
def cuda_ops_vmap(op):
    if op.name == "scaled_by_parts":
        def rule(info, in_dims, x):
            return op.overload(x), [in_dims[0], in_dims[0]]
        return rule
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scaled_by", scratch_root)
    with scratch.built(SOURCE, plugin=PLUGIN):
        yield scratch.name


both = pytest.mark.parametrize("by", ["function", "dispatcher"])
X = torch.tensor([1.0, -2.0, 3.0])


def called(name: str, by: str) -> Callable[..., Any]:
    return registry().public(name) if by == "function" else getattr(torch.ops.cuda_ops, name)


def spec(name: str) -> OpSpec:
    return registry().operators("scaled_by")[name].spec


# --- names --------------------------------------------------------------------------


@both
def test_a_name_reaches_the_function_as_an_enum(name: str, by: str) -> None:
    function = called(name, by)
    for factor, mode in enumerate(("mean", "sum", "none"), start=1):
        torch.testing.assert_close(function(X, mode), factor * X)
        torch.testing.assert_close(function(X, mode=mode), factor * X)
    torch.testing.assert_close(function(X), X)
    maybe = called(f"{name}_maybe", by)
    torch.testing.assert_close(maybe(X), 0 * X)
    torch.testing.assert_close(maybe(X, mode="none"), 3 * X)


@both
def test_another_name_is_refused_alike_for_real_and_fake_tensors(name: str, by: str) -> None:
    message = rf"cuda_ops::{name}: argument 'mode': expected 'mean', 'sum' or 'none', got 'median'$"
    function = called(name, by)
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match=message):
            function(X.to(device), "median")
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=message):
        function(mode.from_tensor(X), "median")
    with pytest.raises(Exception, match="expected 'mean', 'sum' or 'none', got 'median'"):
        torch.compile(function, backend="eager", fullgraph=True)(X, "median")
    with pytest.raises(RuntimeError, match="'mode'"):
        function(X, 3)
    with pytest.raises(RuntimeError, match="'other': expected 'a' or 'bb', got ''"):
        called(f"{name}_texts", by)(X, "free", "")
    with pytest.raises(RuntimeError, match="'x': expected dtype"):  # tensors are checked first
        function(X.long(), "median")


@both
def test_texts_of_any_kind_arrive_whole(name: str, by: str) -> None:
    function = called(f"{name}_texts", by)
    torch.testing.assert_close(function(X, ""), 0 * X)
    torch.testing.assert_close(function(X, "naïve\0x", "bb"), 9 * X)


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to measure memory by")
def test_strings_do_not_leak(name: str) -> None:
    function = registry().public(f"{name}_texts")
    text = "x" * 2**20
    function(X, text, "bb")
    before = _resident()
    for _ in range(200):
        function(X, text, "bb")
        with pytest.raises(RuntimeError, match="'other'"):
            function(X, "name", text)
    assert _resident() - before < 50 * 2**20  # 400 strings are 400 MiB


def test_an_operator_with_a_name_has_everything_that_others_have(name: str) -> None:
    function = registry().public(name)
    x = X.clone().requires_grad_()
    function(x, "sum").sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(X, 2))
    torch.testing.assert_close(torch.vmap(lambda v: function(v, "none"))(X), 3 * X)
    gradient = torch.func.grad(lambda v: function(v, "none").sum())(X)
    torch.testing.assert_close(gradient, torch.full_like(X, 3))
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(X, "sum"), 2 * X)
    torch.testing.assert_close(compiled(X, mode="none"), 3 * X)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x, mode="sum")

    exported = torch.export.export(Module(), (X,), strict=False)
    torch.testing.assert_close(exported.module()(X), 2 * X)
    with torch.autocast("cpu"):
        torch.testing.assert_close(function(X, "sum"), 2 * X)


def test_samples_draw_the_names_and_the_kit_passes(name: str) -> None:
    strategy = samples.strategy(spec(name))
    assert strategy is not None
    seen: set[str] = set()

    @settings(max_examples=40, derandomize=True, database=None, deadline=None)
    @given(strategy)
    def check(sample: samples.Sample) -> None:
        seen.add(sample.args[1])
        assert samples.Sample.parse(repr(sample)) == sample

    check()
    assert seen == {"mean", "sum", "none"}
    keyword_only = sizes.shaped(spec(f"{name}_maybe"), (3,)).args
    assert len(keyword_only) == 2
    report = check_op(name, devices=["cpu"])
    assert report.passed, report


def test_a_composed_operator_passes_no_string_on(scratch_op: ScratchOp) -> None:
    text = """
        #include "binding.h"
        #include "compose.h"
        using namespace cuda_ops;
        static Tensor made(const Tensor& x) {
          return call<Tensor>("aten::gelu", "", x, std::string("tanh"));
        }
        CUDA_OPS(library) { library.op("NAME(Tensor x) -> Tensor", "").composite<made>(); }
        """
    scratch_op.binding.write_text(text.replace("NAME", scratch_op.name))
    with pytest.raises(BuildError, match="leaks a str that it is handed"):
        scratch_op.build()


# --- devices, lists, numbers ----------------------------------------------------------


@both
def test_devices_are_passed(name: str, by: str) -> None:
    function = called(f"{name}_placed", by)
    torch.testing.assert_close(function(X, torch.device("cpu")), X)
    torch.testing.assert_close(function(X, "cpu", "meta"), 2 * X)
    torch.testing.assert_close(function(X, torch.device("meta")), 0 * X)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x, x.device), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), X)


@both
def test_a_gradient_beside_none_in_a_list_is_not_lost(name: str, by: str) -> None:
    call = called(f"{name}_lists", by)
    wanted = torch.ones(3, requires_grad=True)
    call(X, [wanted, wanted], [True]).sum().backward()
    assert wanted.grad is not None
    x = X.clone().requires_grad_()  # with another tensor that requires one, torch looks no further
    assert call(x, [None, wanted], [True]).requires_grad
    with pytest.raises(RuntimeError, match=r"'tensors': expected tensors alone .* got None at \[0"):
        call(X, [None, wanted], [True])
    with torch.no_grad():
        call(X, [None, wanted], [True])


@both
def test_lists_are_passed(name: str, by: str) -> None:
    function = called(f"{name}_lists", by)
    torch.testing.assert_close(function(X, [], [True, False, True]), 2 * X)
    torch.testing.assert_close(function(X, [], [], [1, 2], [0.5]), 3.5 * X)
    torch.testing.assert_close(function(X, [X, None, X[0]], [], []), 1100 * X)
    message = "'tensors': expected tensors on cpu like the others, got one on meta"
    with pytest.raises(RuntimeError, match=message):
        function(X, [None, X.to("meta")], [])
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, [X, None], [True], [2]), 1103 * X)


@both
def test_a_list_of_tensors_is_returned(name: str, by: str) -> None:
    first, second = called(f"{name}_parts", by)(X)
    torch.testing.assert_close((first, second), (X, 2 * X))


@both
def test_a_list_of_results_has_gradients_and_parts(name: str, by: str) -> None:
    function = called(f"{name}_parts", by)

    def loss(x: torch.Tensor) -> torch.Tensor:
        first, second = function(x)
        return first.sum() + 10 * second.sum()

    x = X.clone().requires_grad_()
    loss(x).backward()
    torch.testing.assert_close(x.grad, torch.full_like(X, 21))
    torch.testing.assert_close(torch.func.grad(loss)(X), torch.full_like(X, 21))
    torch.testing.assert_close(torch.vmap(function, in_dims=1, out_dims=1)(X[None])[1], 2 * X[None])
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    x.grad = None
    compiled(x).backward()
    torch.testing.assert_close(x.grad, torch.full_like(X, 21))


@both
def test_a_list_of_arguments_has_gradients_and_parts(name: str, by: str) -> None:
    function = called(f"{name}_lists", by)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return function(X, [X, x], [True]).sum()

    x = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
    loss(x).backward()
    torch.testing.assert_close(x.grad, torch.ones(3))
    torch.testing.assert_close(torch.func.grad(loss)(X), torch.ones(3))
    batch = torch.zeros(2, 3, 4)
    for dim in (0, -1):
        count = batch.shape[dim]
        got = torch.vmap(lambda x: function(X, [X, x, None], []), in_dims=dim)(batch)
        torch.testing.assert_close(got, (1300 * X).expand(count, 3))
    none = torch.vmap(lambda x: function(X, [x], []))(batch[:0])
    assert none.shape == (0, 3)


@both
def test_numbers_are_returned(name: str, by: str) -> None:
    function = called(f"{name}_numbers", by)
    out, dims = function(X)
    torch.testing.assert_close(out, X)
    assert dims == 1
    with FakeTensorMode() as mode:
        out, dims = function(mode.from_tensor(X))
    assert out.shape == X.shape and dims == 1
    with pytest.raises(RuntimeError, match="has no gradient"):
        function(X.clone().requires_grad_())[0].sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x)[0] * (1 + function(x)[1]), fullgraph=True)
    torch.testing.assert_close(compiled(X), 2 * X)


# --- what a binding may not say -------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("planned(Tensor x, Scalar s) -> Tensor", r"'s' is Scalar .*; write 'float', or 'Tensor'"),
        ("planned(Tensor x, Scalar? s) -> Tensor", r"'s' is Scalar\? .*; write 'float\?'"),
        ("planned(Tensor x, Scalar[] s) -> Tensor", r"'s' is Scalar\[\] .*; write 'float\[\]'"),
        ("planned(Tensor x, str[] s) -> Tensor", r"'s' is str\[\] .*; write one 'str' for each"),
        ("planned(Tensor x, Tensor[]? s) -> Tensor", r"'s' is Tensor\[\]\? .*; write 'Tensor\[\]'"),
        ("planned(Tensor x, Layout s) -> Tensor", r"'s' is Layout .*; write nothing"),
        ("planned(Tensor x, MemoryFormat s) -> Tensor", r"'s' is MemoryFormat .*; write a 'bool'"),
        ("planned(Tensor x, Dict(str, Tensor) s) -> Tensor", r"'s' is Dict.*; write one argument"),
        ("planned(Tensor x, (int, int) s) -> Tensor", r"'s' is Tuple.*; write one argument"),
        ("planned(Tensor x, ScalarType[] s) -> Tensor", r"'s' is ScalarType\[\] .*; write one"),
        ("planned(Tensor x, complex s) -> Tensor", r"'s' is complex .*; write two of 'float'"),
        ("planned(Tensor x, Generator? s) -> Tensor", r"'s' is Generator\? .*; write a 'Tensor' t"),
        ("planned(Tensor x, Stream s) -> Tensor", "'s' is Stream .*; write nothing: launch()"),
        ("planned(Tensor x, Storage s) -> Tensor", "'s' is Storage .*; known: Tensor, int, float"),
        ("planned(Tensor x) -> Tensor?", r"return 0 is Tensor\? .*; write 'Tensor', without el"),
        ("planned(Tensor x) -> (Tensor a, str b)", r"return 'b' is str .*; write an 'int'"),
        ("planned(Tensor x) -> (Tensor a, int[] b)", r"return 'b' is int\[\] .*; write one 'int'"),
        ("planned(Tensor x) -> int", "expected a return that is a tensor, .* got int alone"),
        ("planned(Tensor x) -> float", "return 0 is float .*; write 'Tensor' without dims"),
        ("planned(Tensor x) -> (bool, Tensor)", "return 0 is bool .*; write an 'int' that is 0 or"),
        ("planned.fast(Tensor x) -> Tensor", "a name without a dot, .*; write planned_fast"),
        ("planned(Tensor x, *, Tensor y) -> Tensor", r"'y': .* before the '\*', .* y=\.\.\. there"),
    ],
)  # fmt: skip
def test_what_cannot_be_passed_is_refused_with_the_way_round(schema: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        validated(entry(schema))


def test_a_line_describes_tensors_alone() -> None:
    for returned in ("(Tensor[], Tensor)", "(int, Tensor)"):
        with pytest.raises(ManifestError, match='expected "", as no line describes return 0 of'):
            validated(entry(f"planned(Tensor x) -> {returned}", "()->(),()"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": [["mode", ["a"]]]}, r"'mode': expected a default that is 'a', got 'mean'"),
        ({"choices": [["mode", []]]}, r"'mode': expected names that differ in .one_of, got \[\]"),
        ({"choices": [["mode", ["mean"] * 2]]}, "'mode': expected names that differ in .one_of"),
        ({"choices": [["x", ["mean"]]]}, "'x': expected 'mode', which .one_of may name, got 'x'"),
        ({"choices": [["mode", ["mean"]]] * 2}, "'mode': expected to be named once by .one_of"),
        ({"arguments": ["Tensor", "enum"]}, r'\'mode\' is an enum .* \.one_of\("mode", \{\.\.\.\}'),
        ({"arguments": ["Tensor", "enum?"]}, r"\(std::string in C\+\+\), .* std::optional<enum>"),
        ({"arguments": ["Tensor", "int"]}, r"\(std::string in C\+\+\), but .* has int64_t"),
    ],
)
def test_what_a_binding_says_of_names_must_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        validated(entry('planned(Tensor x, str mode="mean") -> Tensor', **changes))
