"""dtypes beyond those of arithmetic: conversions, results of a dtype of their own, bounds of
indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from test_library import entry, validated
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import QUICK

SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
constexpr DType kNarrow[] = {DType::kFloat8E4M3, DType::kFloat8E5M2};
constexpr DType kScales[] = {DType::kFloat8E8M0};
constexpr DType kPairs[] = {DType::kFloat4E2M1x2};
constexpr DType kFloat[] = {DType::kFloat32};
constexpr DType kComplex[] = {DType::kComplex64, DType::kComplex128};
constexpr DType kUnsigned[] = {DType::kUInt16, DType::kUInt32, DType::kUInt64};

template <class To, class From, class F>
void each(const Tensor& out, const Tensor& x, F f) {
  const auto* from = static_cast<const From*>(x.const_data_ptr());
  auto* to = static_cast<To*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = f(from[i]);
}
Tensor narrowed(const Tensor& x_, std::optional<ScalarType> dtype, bool saturate) {
  const Tensor x = contiguous(x_);
  const DType wanted = dtype ? dtype_of(*dtype) : DType::kFloat8E4M3;
  Tensor out = empty(shape_of(x), wanted, x);
  const auto fill = [&](auto tag) {
    using T = decltype(tag);
    each<T, float>(out, x, [=](float v) { return saturate ? T::saturated(v) : T::nearest(v); });
  };
  if (wanted == DType::kFloat8E4M3) fill(Float8E4M3{}); else fill(Float8E5M2{});
  return out;
}
Tensor widened(const Tensor& q_) {
  const Tensor q = contiguous(q_);
  Tensor out = empty(shape_of(q), DType::kFloat32, q);
  const auto fill = [&](auto tag) {
    each<float, decltype(tag)>(out, q, [](auto v) { return v.value(); });
  };
  if (dtype_of(q) == DType::kFloat8E4M3) fill(Float8E4M3{});
  if (dtype_of(q) == DType::kFloat8E5M2) fill(Float8E5M2{});
  if (dtype_of(q) == DType::kFloat8E8M0) fill(Float8E8M0{});
  return out;
}
Tensor scales(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  Tensor out = empty(shape_of(x), DType::kFloat8E8M0, x);
  each<Float8E8M0, float>(out, x, [](float v) { return Float8E8M0::nearest(v); });
  return out;
}
Tensor unpacked(const Tensor& pairs_) {
  const Tensor pairs = contiguous(pairs_);
  auto shape = shape_of(pairs);
  shape.back() *= 2;
  Tensor out = empty(shape, DType::kFloat32, pairs);
  const auto* from = static_cast<const Float4E2M1x2*>(pairs.const_data_ptr());
  auto* to = static_cast<float*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < out.numel(); ++i) to[i] = from[i / 2].value(int(i % 2));
  return out;
}
Tensor as_other(const Tensor& x, const std::optional<Tensor>& like) {
  Tensor out = empty(shape_of(x), like ? dtype_of(*like) : dtype_of(x), x);
  detail::check_torch(aoti_torch_copy_(out.get(), x.get(), 0), "copy");
  return out;
}
Tensor squared(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  Tensor out = empty(shape_of(x), x);
  visit_cpu<DType::kComplex64, DType::kComplex128>(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    each<T, T>(out, x, [](T v) { return v * v; });
  });
  return out;
}
Tensor next_number(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  Tensor out = empty(shape_of(x), x);
  visit_cpu<DType::kUInt16, DType::kUInt32, DType::kUInt64>(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    each<T, T>(out, x, [](T v) { return T(v + 1); });
  });
  return out;
}
Tensor chosen(const Tensor& table_, const Tensor& index_) {
  const Tensor table = contiguous(table_), index = contiguous(index_);
  Tensor out = empty(shape_of(index), table);
  const auto* from = static_cast<const float*>(table.const_data_ptr());
  each<float, int64_t>(out, index, [&](int64_t i) { return from[i]; });
  return out;
}
}
CUDA_OPS(library) {
  library.op("OP(Tensor x, ScalarType? dtype=None, bool saturate=False) -> Tensor q", "(n)->(n)")
      .dtypes(kFloat).dtypes("dtype", kNarrow).returns("q", "dtype", DType::kFloat8E4M3)
      .cpu<narrowed>();
  library.op("OP_widened(Tensor q) -> Tensor", "(n)->(n)")
      .dtypes(kNarrow).returns("out", DType::kFloat32).cpu<widened>();
  library.op("OP_scales(Tensor x) -> Tensor", "(n)->(n)")
      .dtypes(kFloat).returns("out", DType::kFloat8E8M0).cpu<scales>();
  library.op("OP_unpacked(Tensor pairs) -> Tensor", "(n)->(2n)")
      .dtypes(kPairs).returns("out", DType::kFloat32).cpu<unpacked>();
  library.op("OP_other(Tensor x, Tensor? like=None) -> Tensor", "(n),[m]->(n)")
      .dtypes(kFloating).dtypes("like", kFloating).returns("out", "like").cpu<as_other>();
  library.op("OP_squared(Tensor x) -> Tensor", "(n)->(n)").dtypes(kComplex).cpu<squared>();
  library.op("OP_next(Tensor x) -> Tensor", "(n)->(n)").dtypes(kUnsigned).cpu<next_number>();
  library.op("OP_chosen(Tensor table, Tensor index) -> Tensor", "[v],(n)->(n)")
      .dtypes(kFloat).dtypes("index", kInt64).below("index", "v").cpu<chosen>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_dtypes", scratch_root)
    source = SOURCE.replace('"OP(', '"scratch_dtypes(').replace("OP_", "scratch_dtypes_")
    with scratch.built(source):
        yield scratch.name


Function = Callable[..., Any]
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)


def interesting() -> torch.Tensor:
    """Every float32 whose low half is 0, at a step past a tie, or just below one."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    bits = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    return bits.to(torch.int32).view(torch.float32)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor of one-byte numbers, with one code for every NaN."""
    wide = tensor.to(torch.float32)
    return torch.where(wide.isnan(), 256, tensor.view(torch.uint8).to(torch.int32))


# --- conversions -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
def test_numbers_become_narrow_as_in_torch(name: str, dtype: torch.dtype) -> None:
    x = interesting()
    wanted = x.to(dtype)
    if dtype == torch.float8_e4m3fn and torch.tensor(math.inf).to(dtype).isnan():
        # In torch 2.11 what is too large becomes NaN.
        wanted = torch.where(x.isnan(), x, x.clamp(-448, 448)).to(dtype)
    assert torch.equal(bytes_of(registry().public(name)(x, dtype)), bytes_of(wanted))


@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_too_large_becomes_the_largest(name: str, dtype: torch.dtype) -> None:
    x = interesting()
    most = torch.finfo(dtype).max
    wanted = torch.where(x.isnan(), x, x.clamp(-most, most)).to(dtype)
    assert torch.equal(bytes_of(registry().public(name)(x, dtype, saturate=True)), bytes_of(wanted))


def test_scales_become_powers_of_two_as_in_torch(name: str) -> None:
    x = interesting()
    got = registry().public(f"{name}_scales")(x)
    assert torch.equal(bytes_of(got), bytes_of(x.to(torch.float8_e8m0fnu)))


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_numbers_become_floats_as_in_torch(name: str, dtype: torch.dtype) -> None:
    q = torch.arange(256).to(torch.uint8).view(dtype)
    got = registry().public(f"{name}_widened")(q)
    torch.testing.assert_close(got, q.to(torch.float32), rtol=0, atol=0, equal_nan=True)


def test_pairs_of_four_bits(name: str) -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = torch.arange(256)
    pairs = codes.to(torch.uint8).view(torch.float4_e2m1fn_x2)
    got = registry().public(f"{name}_unpacked")(pairs)
    assert torch.equal(got, torch.stack([values[codes % 16], values[codes // 16]], -1).flatten())


def test_complex_and_wide_unsigned_numbers(name: str) -> None:
    for complex_dtype in (torch.complex64, torch.complex128):
        z = torch.randn(5, dtype=complex_dtype)
        torch.testing.assert_close(registry().public(f"{name}_squared")(z), z * z)
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        x = torch.tensor([0, 7, torch.iinfo(dtype).max], dtype=dtype)
        got = registry().public(f"{name}_next")(x)
        assert got.dtype == dtype and got.tolist() == [1, 8, 0]


# --- results of a dtype of their own ------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, *NARROW])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_result_of_another_dtype_compiles(
    name: str, dtype: torch.dtype | None, backend: str
) -> None:
    torch._dynamo.reset()
    function = registry().public(name)
    x = torch.randn(4, 8)
    compiled = torch.compile(lambda x: function(x * 2, dtype), fullgraph=True, backend=backend)
    got = compiled(x)
    assert got.dtype == (dtype or torch.float8_e4m3fn)
    assert torch.equal(bytes_of(got), bytes_of(function(x * 2, dtype)))


def test_fakes_know_the_dtype(name: str) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4)
        assert registry().public(name)(x).dtype == torch.float8_e4m3fn
        assert registry().public(name)(x, torch.float8_e5m2).dtype == torch.float8_e5m2
        other = registry().public(f"{name}_other")
        assert other(x).dtype == torch.float32
        assert other(x, torch.empty(2, dtype=torch.float16)).dtype == torch.float16


def test_vmap_keeps_the_dtype(name: str) -> None:
    x = torch.randn(3, 5)
    got = torch.vmap(lambda row: registry().public(name)(row, torch.float8_e5m2))(x)
    assert got.dtype == torch.float8_e5m2
    assert torch.equal(bytes_of(got), bytes_of(x.to(torch.float8_e5m2)))


def test_autocast_leaves_narrow_numbers_alone(name: str) -> None:
    q = torch.randn(4).to(torch.float8_e4m3fn)
    with torch.autocast("cpu", torch.bfloat16):
        assert registry().public(f"{name}_widened")(q).dtype == torch.float32


def test_another_dtype_is_refused_by_name(name: str) -> None:
    x = torch.randn(4)
    expected = r"'dtype': expected float8_e4m3fn or float8_e5m2, got float16"
    with pytest.raises(RuntimeError, match=f"cuda_ops::{name}: argument {expected}"):
        registry().public(name)(x, torch.float16)
    with pytest.raises(RuntimeError, match=r"'q': expected .*float8_e5m2, got .*float32"):
        registry().public(f"{name}_widened")(x)


# --- what a binding may say ---------------------------------------------------------------

FLOAT8 = ["q", ["float8_e4m3fn"]]


@pytest.mark.parametrize(
    ("schema", "listed", "message"),
    [
        ("planned(Tensor x) -> Tensor", {"results": [["q", "", "int8"]]},
         r"return 'q': expected 'out', which .returns may name, got 'q'"),
        ("planned(Tensor x) -> Tensor q", {"results": [["q", "dtype", ""]]},
         r"return 'q': expected 'x', which .returns may name, got 'dtype'"),
        ("planned(Tensor x, int n) -> Tensor q", {"results": [["q", "n", ""]]},
         r"return 'q': expected 'x', which .returns may name, got 'n'"),
        ("planned(Tensor x) -> Tensor q", {"results": [["q", "", "int8"], ["q", "x", ""]]},
         r"return 'q': expected to be named once by .returns, got twice"),
        ("planned(Tensor x) -> Tensor", {"belows": [["x", "n"]]},
         r"argument 'x': expected nothing, which .below may name, got 'x'"),
        ("planned(Tensor x, Tensor i) -> Tensor",
         {"belows": [["i", "v"]], "dtypes_of": [["i", ["int64"]]], "signature": "(n),()->(n)"},
         r"argument 'i': expected 'n', which .below may name, got 'v'"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_refused_at_load(schema: str, listed: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=rf"^cuda_ops::planned: {message}$"):
        validated(entry(schema, **{"signature": "", **listed}))


@pytest.mark.parametrize(
    "part", ["", "_widened", "_scales", "_unpacked", "_other", "_squared", "_next", "_chosen"]
)
@pytest.mark.quick(1)
def test_the_checks_draw_these_dtypes_and_indices(name: str, part: str) -> None:
    report = check_op(f"{name}{part}", checks=QUICK, devices=["cpu"])
    assert report.passed, str(report)
