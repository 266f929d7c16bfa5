"""Dtypes of single arguments, ranges, and output dims from ints, in C++ and for fakes alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from hypothesis import find, given, settings
from hypothesis import strategies as st
from specs import spec as plain_spec
from torch._subclasses import FakeTensorMode

from cuda_ops.benchmarking import derived as benchmarking_derived
from cuda_ops.build import discovery
from cuda_ops.derive import checks, rules
from cuda_ops.derive.arguments import bind
from cuda_ops.derive.checks import check_arguments
from cuda_ops.registry import registry
from cuda_ops.spec import FloatRange, OpSpec, default_of
from cuda_ops.testing import check_op, samples, sizes
from cuda_ops.testing.checks import by_name

#: The first k numbers of each row, times scale, plus bias; where mask is not 0.
SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
template <class T>
double mask_at(const Tensor& mask, int64_t i) {
  return static_cast<const T*>(mask.const_data_ptr())[i] != 0;
}
Tensor forward(const Tensor& x_, const Tensor& bias_, const Tensor& mask_, int64_t k, double scale,
               std::optional<int64_t>) {
  const Tensor x = contiguous(x_), mask = contiguous(mask_);
  const Tensor bias = contiguous_as(bias_, DType::kFloat64);
  std::vector<int64_t> shape = shape_of(x);
  const int64_t n = shape.back(), rows = n > 0 ? x.numel() / n : 0;
  shape.back() = k;
  Tensor out = empty(shape, x);
  visit_floating_cpu(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    const auto* in = static_cast<const T*>(x.const_data_ptr());
    const auto* b = static_cast<const double*>(bias.const_data_ptr());
    for (int64_t i = 0; i < rows * k; ++i) {
      const int64_t j = i % k;
      const double kept = dtype_of(mask) == DType::kInt64 ? mask_at<int64_t>(mask, j)
                                                          : mask_at<int32_t>(mask, j);
      const double value = double(in[i / k * n + j]) * scale + b[j];
      static_cast<T*>(out.mutable_data_ptr())[i] = static_cast<T>(kept != 0 ? value : 0);
    }
  });
  return out;
}
Tensor scaled(const Tensor& x, double factor, int64_t shift) {
  const auto f = [](double v, double by, int64_t plus) { return v * by + double(plus); };
  return elementwise_cpu(f, x, factor, shift);
}
Tensor limited(const Tensor& x, double by, double plus, int64_t count) {
  const auto f = [](double v, double by, double plus, int64_t n) { return v / by + plus * n; };
  return elementwise_cpu(f, x, by, plus, count);
}
Tensor with_defaults(const Tensor& x, ScalarType a, std::optional<ScalarType> b) {
  return empty({size_of(dtype_of(a)), b ? size_of(dtype_of(*b)) : 0}, dtype_of(a), x);
}
Tensor listed(const std::vector<Tensor>& xs, const std::optional<Tensor>&) {
  return empty({int64_t(xs.size())}, DType::kFloat32, xs[0]);
}
Tensor list(const std::vector<Tensor>& xs) { return listed(xs, {}); }
Tensor within(const Tensor& x, const Tensor&, const std::optional<Tensor>&) {
  return empty({}, x);
}
Tensor gaps(const std::vector<std::optional<Tensor>>& xs) {
  for (const auto& x : xs) {
    if (x) return empty(shape_of(*x), *x);
  }
  return {};
}
// Its keyword-only arguments have the names of parameters of torch's own callbacks.
Tensor named(const Tensor& x, int64_t info, int64_t, int64_t, int64_t) {
  return elementwise_cpu([](double v, int64_t by) { return v * double(by); }, x, info);
}
// Without .dtypes(), the same numbers of bytes for each dtype.
Tensor any(const Tensor& x, const std::vector<Tensor>&, std::optional<ScalarType> dtype) {
  return empty({}, dtype ? dtype_of(*dtype) : dtype_of(x), x);
}
std::tuple<Tensor, Tensor> told(const Tensor& x, const Tensor&, ScalarType dtype) {
  return {empty(shape_of(x), dtype_of(dtype), x), empty(shape_of(x), DType::kInt8, x)};
}
}
constexpr DType kNarrow[] = {DType::kFloat8E4M3, DType::kInt8};
constexpr DType kIndices[] = {DType::kInt64, DType::kInt32};
CUDA_OPS(library) {
  library.op("OP(Tensor x, Tensor bias, Tensor mask, int k, float scale=1.0, int? level=None)"
             " -> Tensor", "(n),[n],[n]->(k)")
      .dtypes(kFloating)
      .dtypes("bias", kFloating)
      .dtypes("mask", kIndices)
      .range("n", 1, 64)
      .range("k", 1, 8)
      .at_most("k", "n")
      .range("level", -1, 1)
      .cpu<forward>();
  library.op("OP_scaled(Tensor x, float factor, int shift) -> Tensor", "()->()")
      .dtypes(kFloating).dtypes("x", DType::kFloat64).cpu<scaled>();
  library.op("OP_limited(Tensor x, float by, float plus, int count) -> Tensor", "()->()")
      .dtypes(kFloating).above("by", 0).at_least("plus", -2.0).at_least("count", 1)
      .cpu<limited>();
  library.op("OP_any(Tensor x, Tensor[] others, ScalarType? dtype=None) -> Tensor", "()->()")
      .cpu<any>();
  library.op("OP_defaults(Tensor x, ScalarType a=half, ScalarType? b=long) -> Tensor", "")
      .cpu<with_defaults>();
  library.op("OP_told(Tensor x, Tensor at, ScalarType dtype) -> (Tensor q, Tensor sign)",
             "(n),(m)->(n),(n)")
      .dtypes(kFloating).dtypes("at", kInt64).dtypes("dtype", kNarrow).below("at", "n")
      .returns("q", "dtype").returns("sign", DType::kInt8).cpu<told>();
  library.op("OP_within(Tensor x, Tensor y, Tensor? z=None) -> Tensor", "(n),(3m),(p)->()")
      .dtypes(kFloating).at_most("2m", "n").at_most("p", "m").cpu<within>();
  library.op("OP_listed(Tensor[] xs, Tensor? y=None) -> Tensor", "").cpu<listed>();
  library.op("OP_list(Tensor[] xs) -> Tensor", "").cpu<list>();
  library.op("OP_gaps(Tensor?[] xs) -> Tensor", "").cpu<gaps>();
  library.op("OP_named(Tensor x, *, int info, int in_dims, int op, int args) -> Tensor",
             "()->()").dtypes(kFloating).cpu<named>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_arguments", scratch_root)
    source = SOURCE.replace("OP(", "scratch_arguments(").replace("OP_", "scratch_arguments_")
    with scratch.built(source):
        yield scratch.name


def spec(name: str) -> OpSpec:
    return registry().operators("scratch_arguments")[name].spec


def by_torch(
    x: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, k: int, scale: float = 1.0,
    level: int | None = None,
) -> torch.Tensor:  # fmt: skip
    return torch.where(mask[:k] != 0, x[..., :k] * scale + bias[:k].to(x.dtype), 0)


@pytest.mark.slow
def test_an_output_has_the_size_that_an_int_says(name: str) -> None:
    arguments = torch.randn(3, 5), torch.randn(5).double(), torch.tensor([1, 0, 2, 3, 0]), 4
    function = registry().public(name)
    torch.testing.assert_close(function(*arguments), by_torch(*arguments))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in arguments]
        assert function(*fakes).shape == (3, 4)
    mapped = torch.vmap(lambda x: function(x, *arguments[1:]))(arguments[0])
    torch.testing.assert_close(mapped, by_torch(*arguments))


X, BIAS, MASK = torch.ones(2, 3), torch.ones(3), torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (X.int(), BIAS, MASK, 1),
            "'x': expected dtype float64, float32, float16 or bfloat16, got int32",
        ),
        (
            (X, BIAS.int(), MASK, 1),
            "'bias': expected dtype float64, float32, float16 or bfloat16, got int32",
        ),
        ((X, BIAS, BIAS, 1), "'mask': expected dtype int64 or int32, got float32"),
        ((X, BIAS, MASK.short(), 1), "'mask': expected dtype int64 or int32, got int16"),
        (
            (X[:, :0], BIAS, MASK, 1),
            "'x': expected dim 'n' of (..., n) to be from 1 to 64, got shape [2, 0]",
        ),
        (
            (torch.ones(2, 65), BIAS, MASK, 1),
            "'x': expected dim 'n' of (..., n) to be from 1 to 64, got shape [2, 65]",
        ),
        ((X, BIAS[:2], MASK, 1), "'bias': expected dim 'n' of [n] to be 3, got shape [2]"),
        ((X, BIAS, MASK, 0), "'k': expected from 1 to 8, got 0"),
        ((X, BIAS, MASK, 9), "'k': expected from 1 to 8, got 9"),
        ((X, BIAS, MASK, 4), "'k': expected at most 3, the size of dim 'n', got 4"),
        ((X, BIAS, MASK, 1, 1.0, -2), "'level': expected from -1 to 1, got -2"),
    ],
)
def test_arguments_are_refused_in_the_same_words(
    name: str, arguments: tuple[Any, ...], message: str
) -> None:
    expected = rf"^cuda_ops::{name}: argument {re.escape(message)}$"
    for function in (registry().public(name), getattr(torch.ops.cuda_ops, name)):
        for device in ("cpu", "meta"):
            moved = [v.to(device) if isinstance(v, torch.Tensor) else v for v in arguments]
            with pytest.raises(RuntimeError, match=expected):
                function(*moved)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (5, 9),
            "'y': expected dim '3m' of (..., 3m) to be at most 6, as 2m is at most n",
        ),
        (
            (5, 6, 3),
            "'z': expected dim 'p' of (..., p) to be at most 2, as p is at most m, got shape [3]",
        ),
        (
            (0, 3),
            "'y': expected dim '3m' of (..., 3m) to be at most 0, as 2m is at most n",
        ),
    ],
)
def test_a_dim_beyond_another_is_refused_in_the_same_words(
    name: str, sizes: tuple[int, ...], message: str
) -> None:
    function = registry().public(f"{name}_within")
    for device in ("cpu", "meta"):
        function(*(torch.ones(size, device=device) for size in (5, 6, 2)))
        function(*(torch.ones(size, device=device) for size in (0, 0)))
        with pytest.raises(RuntimeError, match=re.escape(f"_within: argument {message}")):
            function(*(torch.ones(size, device=device) for size in sizes))


def test_samples_keep_dims_within_others(name: str) -> None:
    op = spec(f"{name}_within")
    drawn = samples.strategy(op)
    assert drawn is not None

    @settings(max_examples=100, deadline=None)
    @given(drawn)
    def fits(sample: samples.Sample) -> None:
        check_arguments(op, sample.make("meta"))

    fits()
    check_arguments(op, sizes.shaped(op, (2,), core=8).make("meta"))


def test_kernels_know_what_python_lists() -> None:
    text = (discovery.INCLUDE_DIR / "dtype.h").read_text()
    named = re.findall(r'case DType::k\w+: return "(\w+)"', text)
    assert [getattr(torch, one) for one in named] == list(checks.KNOWN_DTYPES)


UNKNOWN = (
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.bits8,
)  # fmt: skip
EXPECTED = "expected dtype float64, .* complex64 or complex128, got"


@pytest.mark.parametrize("dtype", UNKNOWN, ids=str)
def test_a_dtype_that_no_kernel_knows_is_refused(name: str, dtype: torch.dtype) -> None:
    called = str(dtype).removeprefix("torch.")
    for function in (registry().public(f"{name}_any"), getattr(torch.ops.cuda_ops, f"{name}_any")):
        for device in ("cpu", "meta"):
            known, odd = torch.empty(2, device=device), torch.empty(2, dtype=dtype, device=device)
            with pytest.raises(RuntimeError, match=f"_any: argument 'x': {EXPECTED} {called}$"):
                function(odd, [])
            with pytest.raises(RuntimeError, match=f"_any: argument 'others': {EXPECTED} {called}"):
                function(known, [known, odd])


def test_a_dtype_as_an_argument_is_one_that_kernels_know(name: str) -> None:
    """torch.sum(x, dtype=99) is a TypeError; torch.ops.aten.sum, like our operators by their
    dispatcher's name, is handed an enum that has no such value, which may end the process.
    """
    function = registry().public(f"{name}_any")
    for dtype in checks.KNOWN_DTYPES:
        if dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
            continue  # torch's stable ABI passes neither as an argument
        assert function(X, [], dtype).dtype == dtype
    assert function(X, []).dtype == function(X, [], dtype=None).dtype == torch.float32
    compiled = torch.compile(lambda x, d: function(x, [], d), backend="eager")
    for wrong in (99, 261, -1, 5, "float32", 1.5, *UNKNOWN, torch.int4, torch.qint8):
        called = str(wrong).removeprefix("torch.") if wrong != "float32" else repr(wrong)
        what = "a dtype that kernels know" if isinstance(wrong, torch.dtype) else "a torch.dtype"
        message = f"_any: argument 'dtype': expected {what}, got {called}"
        for call in (lambda d: function(X, [], d), lambda d: compiled(X, d)):
            with pytest.raises(RuntimeError, match=message):
                call(wrong)


@pytest.mark.parametrize("position", ["x", "others"])
def test_a_tensor_whose_memory_was_freed_is_refused(name: str, position: str) -> None:
    """torch's own functions read from address 0."""
    freed = torch.ones(3)
    end, nothing = freed[1:], freed[:0]
    freed.untyped_storage().resize_(0)
    message = f"'{position}': expected a tensor with memory, got one whose storage is empty"
    for gone in (freed, end):  # the address of a view of nothing is its offset
        for function in both_functions(name):
            with pytest.raises(RuntimeError, match=f"^cuda_ops::{name}_any: argument {message}$"):
                function(*((gone, []) if position == "x" else (X, [X, gone])))
    assert registry().public(f"{name}_any")(nothing, []).shape == ()


@pytest.mark.parametrize("position", ["x", "others"])
def test_a_tensor_whose_memory_was_shrunk_is_refused(name: str, position: str) -> None:
    """torch's own functions read past its end."""
    shrunk = torch.ones(2, 3)
    whole = shrunk[:, :2], shrunk[0], shrunk[1, :2], shrunk[:0]
    shrunk.untyped_storage().resize_(5 * 4)
    message = f"'{position}': expected a storage of at least 24 bytes, got one of 20"
    for function in both_functions(name):
        with pytest.raises(RuntimeError, match=f"^cuda_ops::{name}_any: argument {message}$"):
            function(*((shrunk, []) if position == "x" else (X, [X, shrunk])))
    for enough in whole:
        assert registry().public(f"{name}_any")(enough, [enough]).shape == ()


def both_functions(name: str) -> tuple[Any, Any]:
    return registry().public(f"{name}_any"), getattr(torch.ops.cuda_ops, f"{name}_any")


@pytest.mark.parametrize("level", [None, 0])
def test_arguments_in_range_are_taken(name: str, level: int | None) -> None:
    for dtype in (torch.int64, torch.int32):
        out = registry().public(name)(X.half(), BIAS.double(), MASK.to(dtype), 3, 2.0, level)
        assert torch.equal(out, torch.full((2, 3), 3.0, dtype=torch.float16))


def test_scalars_follow_the_values(name: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64).t()
    out = registry().public(f"{name}_scaled")(x, 2.5, -3)
    torch.testing.assert_close(out, x * 2.5 - 3)
    with pytest.raises(RuntimeError, match="'x': expected dtype float64, got float32"):
        registry().public(f"{name}_scaled")(x.float(), 2.5, -3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.0, 1), "'by': expected above 0, got 0"),
        ((-math.inf, 0.0, 1), "'by': expected above 0, got -inf"),
        ((math.nan, 0.0, 1), "'by': expected above 0, got nan"),
        ((1.0, -2.5, 1), "'plus': expected at least -2, got -2.5"),
        ((1.0, math.nan, 1), "'plus': expected at least -2, got nan"),
        ((1.0, 0.0, 0), "'count': expected at least 1, got 0"),
    ],
)
def test_a_range_may_have_one_end(name: str, arguments: tuple[Any, ...], message: str) -> None:
    function = registry().public(f"{name}_limited")
    for device in ("cpu", "meta"):
        x = torch.ones(3, device=device)
        with pytest.raises(RuntimeError, match=rf"_limited: argument {re.escape(message)}$"):
            function(x, *arguments)
        assert function(x, 5e-324, -2.0, 2**62).shape == (3,)
        assert function(x, math.inf, math.inf, 1).shape == (3,)


def test_samples_lie_above_an_end_that_is_left_out(name: str) -> None:
    op = spec(f"{name}_limited")
    for least, drawn, example in (
        (0.0, {1.0, 0.5, 2.0}, 0.5),
        (3.0, {4.5}, 4.5),
        (-4.0, {0.0, 1.0, -1.0, 0.5, 2.0, -3.25}, 0.5),
    ):
        within = {**op.float_ranges, "by": FloatRange(least, is_open=True)}
        changed = replace(op, float_ranges=within)
        (by,) = (one for one in changed.parsed.arguments if one.name == "by")
        strategy = samples._scalar(changed, by)
        assert strategy is not None
        assert find(st.sets(strategy, min_size=len(drawn)), lambda values: True) == drawn
        assert sizes.example_scalar(changed, by) == example


def test_samples_fit_each_argument(name: str) -> None:
    op = spec(name)
    strategy = samples.strategy(op)
    assert strategy is not None
    seen: set[tuple[torch.dtype, ...]] = set()

    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(strategy)
    def check(sample: samples.Sample) -> None:
        x, bias, mask, k, _, level = sample.args
        assert x.dtype in op.dtypes and bias.dtype in op.dtypes
        assert mask.dtype in (torch.int64, torch.int32)
        assert 1 <= x.shape[-1] <= 64 and 1 <= k <= 8 and level in (None, -1, 0, 1)
        seen.add((x.dtype, bias.dtype, mask.dtype))

    check()
    assert len(seen) > 20
    for dtype in (None, torch.float64):
        sample = sizes.shaped(op, (2,), dtype=dtype)
        assert [arg.dtype for arg in sample.tensors] == [dtype or torch.float32] * 2 + [torch.int64]


def test_cases_fit_each_argument(name: str) -> None:
    cases = benchmarking_derived.cuda_ops_benchmarks(spec(name)) or []
    (case,) = (case for case in cases if case.label == "4096x64 float32")
    x, bias, mask, k, *_ = case.make_inputs(torch.device("cpu"))
    # A result as long as what is read, as far as k goes.
    assert (x.shape, bias.dtype, mask.dtype, k) == ((4096, 64), torch.float32, torch.int64, 8)
    assert case.bytes == 4 * (4096 * 64 + 64 + 4096 * 8) + 8 * 64


def test_only_arguments_that_share_a_dtype_are_promoted() -> None:
    schema = "f(Tensor x, Tensor y, Tensor weight, Tensor index) -> Tensor"
    op = replace(plain_spec(schema, "(),(),(),()->()"), dtypes_of={"index": (torch.int64,)})
    words = dict.fromkeys(("x", "y", "weight"), "promote")
    assert rules.cuda_ops_autocast(op) == words
    alone = replace(op, dtypes_of=dict.fromkeys(("y", "weight", "index"), (torch.int64,)))
    assert rules.cuda_ops_autocast(alone) is None


@pytest.mark.slow
def test_it_passes_its_checks(name: str) -> None:
    """The kit draws each argument in a dtype of its own list."""
    report = check_op(name, checks=[by_name("reference"), by_name("registration")], devices=["cpu"])
    assert report.passed, str(report)
    assert [entry.passed for entry in report.entries] == [True, True]


def test_a_dtype_argument_may_have_a_default(name: str) -> None:
    public = registry().public(f"{name}_defaults")
    for function in (public, getattr(torch.ops.cuda_ops, f"{name}_defaults")):
        out = function(X)
        assert (out.shape, out.dtype) == ((2, 8), torch.float16)
        out = function(X, torch.float64, None)
        assert (out.shape, out.dtype) == ((8, 0), torch.float64)
    op = spec(f"{name}_defaults")
    assert bind(op, [X], {})[1:] == [torch.float16, torch.int64]
    assert sizes.shaped(op, (2,)).args[1:] == (torch.float16, torch.int64)


def test_every_dtype_that_a_schema_may_name_is_known() -> None:
    names = {"half": torch.float16, "float": torch.float32, "double": torch.float64,
             "long": torch.int64, "bool": torch.bool, "bfloat16": torch.bfloat16,
             "complex64": torch.complex64, "uint8": torch.uint8}  # fmt: skip
    for text, dtype in names.items():
        try:
            parsed = torch._C.parse_schema(f"f(ScalarType d={text}) -> Tensor")
        except RuntimeError:  # this torch does not know the name
            continue
        assert default_of(parsed.arguments[0]) is dtype


def test_a_call_without_any_tensor_is_refused_by_name(name: str) -> None:
    function = registry().public(f"{name}_listed")
    assert function([X, X]).shape == (2,)
    with pytest.raises(RuntimeError, match="'xs': expected a tensor, whose device says which"):
        function([])
    function = registry().public(f"{name}_list")
    assert function([X, X]).shape == (2,)
    with pytest.raises(RuntimeError, match="'xs': expected a tensor, whose device says which"):
        function([])
    function = registry().public(f"{name}_gaps")
    assert function([None, X]).shape == X.shape
    for none in ([], [None, None]):
        with pytest.raises(RuntimeError, match="'xs': expected a tensor, whose device says which"):
            function(none)


@pytest.mark.parametrize(
    ("part", "arguments", "message"),
    [
        ("scaled", (X.numpy(), 2.0, 1), "'x': expected a tensor, got ndarray"),
        ("scaled", (X, "a", 1), "'factor': expected a number, got str"),
        ("scaled", (X, X, 1), "'factor': expected a number, got Tensor"),
        ("scaled", (X, 2.0, 1.5), "'shift': expected an int, got float"),
        ("scaled", (X, 2.0, None), "'shift': expected an int, got None"),
        ("listed", (X.numpy(),), "'xs': expected a list of tensors, got ndarray"),
        ("listed", ([X, "a"],), "'xs': expected a list of tensors, got list of Tensor, str"),
        ("listed", ([X], 3), r"'\w+': expected a tensor or None, got int"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_in_one_line(
    name: str, part: str, arguments: tuple[Any, ...], message: str
) -> None:
    function = registry().public(f"{name}_{part}")
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), pytest.raises(RuntimeError) as raised:
            function(*arguments)
        expected = rf"cuda_ops::{name}_{part}: argument {message}"
        assert re.fullmatch(expected, str(raised.value)) and raised.value.__suppress_context__


def test_tensors_of_a_list_are_on_one_device(name: str) -> None:
    op = spec(f"{name}_listed")
    elsewhere, on_cpu = X.to("meta"), torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    message = "'xs': expected tensors on cpu like the others, got one on meta"
    with pytest.raises(RuntimeError, match=message):
        check_arguments(op, [[X, elsewhere], None])
    with pytest.raises(RuntimeError, match=message):
        op.overload.redispatch(on_cpu, [X, elsewhere], None)


def test_keyword_only_arguments_may_have_any_name(name: str) -> None:
    public, keywords = registry().public(f"{name}_named"), {"in_dims": 1, "op": 2, "args": 3}
    for function in (public, getattr(torch.ops.cuda_ops, f"{name}_named")):
        torch.testing.assert_close(function(X, info=3, **keywords), 3 * X)
        mapped = torch.vmap(lambda x, function=function: function(x, info=3, **keywords))
        torch.testing.assert_close(mapped(X), 3 * X)
    with FakeTensorMode() as mode:
        assert public(mode.from_tensor(X), info=3, **keywords).shape == X.shape


def test_a_binding_says_the_dtypes_of_results(name: str) -> None:
    public, at = registry().public(f"{name}_told"), torch.zeros(1, dtype=torch.int64)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        for device in ("cpu", "meta"):
            q, sign = public(X.to(device), at.to(device), dtype)
            assert (q.dtype, sign.dtype) == (dtype, torch.int8)
    message = "'dtype': expected float8_e4m3fn or int8, got float32"
    for function in (public, getattr(torch.ops.cuda_ops, f"{name}_told")):
        for device in ("cpu", "meta"):
            with pytest.raises(RuntimeError, match=message):
                function(X.to(device), at.to(device), torch.float32)


def test_samples_follow_the_lists_of_dtypes_and_bounds(name: str) -> None:
    strategy = samples.strategy(spec(f"{name}_told"))
    assert strategy is not None
    seen: set[torch.dtype] = set()

    @settings(max_examples=50, derandomize=True, database=None, deadline=None)
    @given(strategy)
    def check(sample: samples.Sample) -> None:
        x, at, dtype = sample.args
        assert at.below == x.shape[-1] > 0
        seen.add(dtype)

    check()
    assert seen == {torch.float8_e4m3fn, torch.int8}
