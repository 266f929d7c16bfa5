"""Operators without a tensor argument: a Device argument says which kernel to call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from hypothesis import given, settings
from test_library import entry, validated
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.benchmarking import derived as benchmarking_derived
from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.signature import parse_signature
from cuda_ops.spec import OpSpec
from cuda_ops.testing import check_op, samples

SOURCE = r"""
#pragma GCC optimize("O0")
#include <cmath>

#include "binding.h"
using namespace cuda_ops;
namespace {
// cos and sin of row * column / (1 + base^2)
std::tuple<Tensor, Tensor> table(int64_t length, int64_t half, double base,
                                 std::optional<ScalarType> dtype,
                                 const std::optional<Device>& device) {
  const DType wanted = dtype_of(dtype, DType::kFloat32);
  Tensor cos = empty({length, half}, wanted, device), sin = empty({length, half}, wanted, device);
  visit_floating_cpu(wanted, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t i = 0; i < length * half; ++i) {
      const double angle = double(i / half) * double(i % half) / (1 + base * base);
      static_cast<T*>(cos.mutable_data_ptr())[i] = static_cast<T>(std::cos(angle));
      static_cast<T*>(sin.mutable_data_ptr())[i] = static_cast<T>(std::sin(angle));
    }
  });
  return {cos, sin};
}
Tensor range(int64_t count, int64_t step, Device device) {
  Tensor out = empty({count}, DType::kInt64, device);
  for (int64_t i = 0; i < count; ++i) static_cast<int64_t*>(out.mutable_data_ptr())[i] = i * step;
  return out;
}
Tensor wrong(int64_t count, Device device) { return range(count, 1, device); }
}
CUDA_OPS(library) {
  library.op("cosines(SymInt length, SymInt half, float base=1.0, *, ScalarType? dtype=None, "
             "Device? device=None) -> (Tensor cos, Tensor sin)", "->(length,half),(length,half)")
      .dtypes("dtype", kFloating)
      .range("length", 0, 1000)
      .returns("cos", "dtype", DType::kFloat32)
      .returns("sin", "dtype", DType::kFloat32)
      .cpu<table>();
  library.op("cosines_range(int count, int step, Device device) -> Tensor", "->(count)")
      .returns("out", DType::kInt64).cpu<range>();
  library.op("cosines_wrong(int count, Device device) -> Tensor", "->(count)")
      .returns("out", DType::kFloat32).cpu<wrong>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("cosines", scratch_root)
    with scratch.built(SOURCE):
        yield scratch.name


both = pytest.mark.parametrize("by", ["function", "dispatcher"])


def called(name: str, by: str) -> Callable[..., Any]:
    return registry().public(name) if by == "function" else getattr(torch.ops.cuda_ops, name)


def spec(name: str) -> OpSpec:
    return registry().operators("cosines")[name].spec


def table(
    length: int, half: int, base: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.arange(half, dtype=torch.float64) / (1 + base**2)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * columns
    return angles.cos().to(dtype), angles.sin().to(dtype)


@both
def test_the_device_says_which_kernel_to_call(name: str, by: str) -> None:
    function = called(name, by)
    for device in (None, "cpu", torch.device("cpu"), torch.device("cpu", 0)):
        torch.testing.assert_close(function(5, 3, device=device), table(5, 3))
    wanted = table(2, 4, 10.0, torch.float64)
    torch.testing.assert_close(function(2, 4, 10.0, dtype=torch.float64), wanted)
    cos, sin = function(5, 3, dtype=torch.bfloat16, device="meta")
    assert cos.shape == sin.shape == (5, 3)
    assert cos.device.type == "meta" and sin.dtype == torch.bfloat16
    ranged = called(f"{name}_range", by)
    assert ranged(3, 2, torch.device("cpu")).tolist() == [0, 2, 4]
    assert ranged(0, 2, "cpu").shape == (0,)
    with torch.inference_mode():
        assert function(5, 3)[0].is_inference()


def test_the_default_device_is_torchs(name: str) -> None:
    function = called(name, "function")
    with torch.device("meta"):
        assert function(5, 3)[0].device.type == "meta"
        assert function(5, 3, device="cpu")[0].device.type == "cpu"
    torch.set_default_device("meta")
    try:
        assert function(5, 3)[0].device.type == "meta"
        dispatched = called(name, "dispatcher")(5, 3)[0]  # torch.ops.aten.empty asks nothing either
        assert dispatched.device.type == "cpu"
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(function(5, 3), table(5, 3))


@both
def test_what_it_cannot_do_is_refused_by_name(name: str, by: str) -> None:
    function = called(name, by)
    wrong = [
        ({"length": 1001}, "'length': expected from 0 to 1000, got 1001"),
        ({"half": -1}, "'half': expected at least 0, got -1"),
        ({"dtype": torch.int8}, "'dtype': expected float64, float32, .*, got int8"),
        ({"device": "xpu"}, "'device': expected a device of type cpu, got xpu"),
        ({"device": torch.device("cuda", 0)}, "'device': expected a device of type cpu, got cuda"),
    ]
    for change, message in wrong:
        for device in ("cpu", "meta"):
            with pytest.raises(RuntimeError, match=message):
                function(**{"length": 5, "half": 3, "device": device} | change)
        with FakeTensorMode(), pytest.raises(RuntimeError, match=message):
            function(**{"length": 5, "half": 3} | change)


@both
def test_fakes_are_on_the_device(name: str, by: str) -> None:
    function = called(name, by)
    with FakeTensorMode():
        for device in ("cpu", "meta"):
            cos, sin = function(5, 3, dtype=torch.half, device=device)
            assert cos.shape == sin.shape == (5, 3) and cos.dtype == torch.half
            assert cos.device.type == device
        assert function(5, 3)[0].device.type == "cpu"
        assert called(f"{name}_range", by)(7, 1, "cpu").dtype == torch.int64


@both
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_it_compiles(name: str, by: str, backend: str) -> None:
    function = called(name, by)
    torch._dynamo.reset()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        cos, sin = function(x.shape[0], x.shape[1], device=x.device)
        return x * cos + x * sin

    compiled = torch.compile(rotated, fullgraph=True, backend=backend)
    for length in (3, 5, 8):
        x = torch.randn(length, 4)
        cos, sin = table(length, 4)
        torch.testing.assert_close(compiled(x), x * cos + x * sin)
    alone = torch.compile(lambda n: function(n, 2), fullgraph=True, backend=backend)
    torch.testing.assert_close(alone(3), table(3, 2))


def test_the_default_device_of_a_trace(name: str) -> None:
    function = called(name, "function")
    torch._dynamo.reset()
    compiled = torch.compile(lambda: function(3, 2)[0], fullgraph=True, backend="aot_eager")
    assert compiled().device.type == "cpu"
    with torch.device("meta"):
        assert compiled().device.type == "meta"


def test_it_is_exported(name: str) -> None:
    function = called(name, "function")

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * function(x.shape[0], 4)[0]

    x, length = torch.randn(3, 4), torch.export.Dim("length", max=1000)
    exported = torch.export.export(Module(), (x,), dynamic_shapes=({0: length},), strict=False)
    for length in (3, 6):
        x = torch.randn(length, 4)
        torch.testing.assert_close(exported.module()(x), x * table(length, 4)[0])


@both
def test_transforms_take_it_as_a_constant(name: str, by: str) -> None:
    function = called(name, by)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * function(3, 2)[0]).sum()

    x = torch.randn(3, 2)
    cos = table(3, 2)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x), cos)
    torch.testing.assert_close(torch.vmap(loss)(x.expand(4, 3, 2)), (x * cos).sum().expand(4))
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (x,))[1], (x * cos).sum())
    x.requires_grad_()
    loss(x).backward()
    torch.testing.assert_close(x.grad, cos)
    with torch.autocast("cpu"):
        assert function(3, 2)[0].dtype == torch.float32


def test_a_reload_may_change_the_schema(scratch_op: ScratchOp) -> None:
    name = scratch_op.name
    text = """
        #include "binding.h"
        using namespace cuda_ops;
        static Tensor made(int64_t n, PARAMETER std::optional<Device> device) {
          return empty({n}, DType::kFloat32, device);
        }
        CUDA_OPS(library) {
          library.op("NAME(int n, ARGUMENT Device? device=None) -> Tensor", "->(n)")
              .returns("out", DType::kFloat32).cpu<made>();
        }
        """.replace("NAME", name)
    scratch_op.binding.write_text(text.replace("PARAMETER", "").replace("ARGUMENT", ""))
    scratch_op.reload()
    function = scratch_op.function
    assert function(3).shape == (3,)
    text = text.replace("PARAMETER", "int64_t,").replace("ARGUMENT", "int more=0,")
    scratch_op.binding.write_text(text)
    scratch_op.reload()
    for called in (function, getattr(torch.ops.cuda_ops, name)):
        assert called(3, 2, "cpu").shape == called(4, more=1)[1:].shape == (3,)
        with FakeTensorMode():
            assert called(3, 2, "cpu").shape == (3,)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert compiled(2, 1).shape == (2,)


def test_samples_choose_sizes_and_the_device(name: str) -> None:
    strategy = samples.strategy(spec(name))
    assert strategy is not None
    lengths: set[int] = set()

    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(strategy)
    def check(sample: samples.Sample) -> None:
        length, half = sample.args[:2]
        assert 0 <= length <= 1000 and length * half <= samples.MAX_NUMEL
        lengths.add(length)
        assert samples.Sample.parse(repr(sample)) == sample
        for device in ("cpu", "meta"):
            assert sample.make(device)[-1] == torch.device(device)

    check()
    assert 0 in lengths and max(lengths) > 32


@pytest.mark.parametrize("which", ["", "_range"])
def test_the_kit_passes(name: str, which: str) -> None:
    report = check_op(name + which, devices=["cpu"])
    assert report.passed, str(report)


def test_the_kit_finds_a_result_of_another_dtype(name: str) -> None:
    report = check_op(f"{name}_wrong", devices=["cpu"])
    assert not report.passed and report.failures[0].check == "registration", str(report)


def test_benchmarks_are_derived(name: str) -> None:
    cases = benchmarking_derived.cuda_ops_benchmarks(spec(name))
    assert cases
    for case in cases:
        args = case.make_inputs(torch.device("meta"))
        assert case.keywords["device"] == samples.DeviceArg()
        outputs = called(name, "function")(*args, **{**case.keywords, "device": "meta"})
        assert sum(out.nbytes for out in outputs) == case.bytes > 0
    assert {case.dtype for case in cases} >= {torch.float32, torch.bfloat16}


def test_a_line_may_have_no_inputs() -> None:
    line = parse_signature("->(n,2d)", ["n", "d"])
    assert (line.inputs, line.names, line.int_names) == ((), (), ("d", "n"))
    assert str(line) == "->(n,2d)" and math.prod(line.outputs[0].shape((), {"n": 3, "d": 2})) == 12
    with pytest.raises(ValueError, match="is in no input"):
        parse_signature("->(n)")


@pytest.mark.parametrize(
    ("schema", "line", "results", "message"),
    [
        ("planned(int n) -> Tensor", "->(n)", [], "or one of type Device, .* got none; write one"),
        ("planned(int n, Device a, Device b) -> Tensor", "->(n)", [], "got 'a' and 'b'; write one"),
        ("planned(int n, Device d) -> Tensor", "->(n)", [],
         r"'out': expected \.returns\(\"out\", DType::kFloat32\) or another dtype, .* got none"),
        ("planned(int n, ScalarType? t, Device d) -> Tensor", "->(n)", [["out", "t", ""]],
         r"'out': expected \.returns\(\"out\", \"t\", DType::kFloat32\) or another dtype"),
        ("planned(int n, Device d) -> Tensor", "(n)->(n)", [["out", "", "int8"]],
         "has 1 tensor arguments, the schema has 0"),
        ("planned(Tensor x, int n) -> Tensor", "->(n)", [], "0 tensor arguments, the schema has 1"),
    ],
)  # fmt: skip
def test_what_chooses_must_be_said(
    schema: str, line: str, results: list[list[str]], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        validated(entry(schema, line, results=results, dtypes=[]))


def test_what_says_all_is_taken() -> None:
    fixed = "planned(int n, Device? device=None) -> Tensor"
    validated(entry(fixed, "->(n)", results=[["out", "", "int8"]], dtypes=[]))
    typed = "planned(int n, *, ScalarType dtype, Device device) -> Tensor"
    op = validated(entry(typed, "->(n)", results=[["out", "dtype", ""]], dtypes=[]))
    assert op.device_position == 2 and op.output_dtypes({"dtype": torch.half}) == (torch.half,)
