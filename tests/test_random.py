"""Random numbers by counter, operators that take a random key, and when the key is drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp, needs_gpu
from torch.utils.checkpoint import checkpoint

from cuda_ops.derive.random import draw_key
from cuda_ops.dispatch import library
from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.testing import PROFILES, check_op
from cuda_ops.testing.philox import philox, random_bits, random_uniform

BINDING = """
#pragma GCC optimize("O0")
#include "binding.h"
#include "compose.h"
#include "random_binding.h"
using namespace cuda_ops;
cudaError_t noise_launch(const Strided<2>&, RandomKey, double, cudaStream_t);
cudaError_t bits_launch(const Strided<2>&, RandomKey, cudaStream_t);
cudaError_t uniform_launch(const Strided<2>&, RandomKey, cudaStream_t);
cudaError_t normal_launch(const Strided<2>&, RandomKey, cudaStream_t);
cudaError_t below_launch(const Strided<2>&, RandomKey, int64_t, cudaStream_t);
namespace {
double add_noise(const Draw& draw, double x, double scale) {
  return x + scale * draw.normal<double>();
}
Tensor noise(const Tensor& x, const Tensor& key, double scale) {
  return random_cpu(add_noise, key, x, scale);
}
Tensor noise_cuda(const Tensor& x, const Tensor& key, double scale) {
  return random_cuda(noise_launch, key, x, scale);
}
Tensor bits(const Tensor& x, const Tensor& key) {
  return random_cpu([](const Draw& draw, double) { return double(draw.bits()); }, key, x);
}
Tensor bits_cuda(const Tensor& x, const Tensor& key) { return random_cuda(bits_launch, key, x); }
Tensor uniform(const Tensor& x, const Tensor& key) {
  return random_cpu([](const Draw& draw, double) { return draw.uniform(); }, key, x);
}
Tensor uniform_cuda(const Tensor& x, const Tensor& key) {
  return random_cuda(uniform_launch, key, x);
}
Tensor normal(const Tensor& x, const Tensor& key) {
  return random_cpu([](const Draw& draw, double) { return draw.normal<double>(); }, key, x);
}
Tensor normal_cuda(const Tensor& x, const Tensor& key) {
  return random_cuda(normal_launch, key, x);
}
Tensor below(const Tensor& x, const Tensor& key, int64_t n) {
  const auto f = [](const Draw& draw, double, int64_t n) -> double { return draw.below(n); };
  return random_cpu(f, key, x, n);
}
Tensor below_cuda(const Tensor& x, const Tensor& key, int64_t n) {
  return random_cuda(below_launch, key, x, n);
}
Tensor words(const Tensor& in) {  // a counter and a key
  const auto* from = static_cast<const int64_t*>(in.const_data_ptr());
  const RandomBlock counter{
      {uint32_t(from[0]), uint32_t(from[1]), uint32_t(from[2]), uint32_t(from[3])}};
  const RandomBlock block = philox(counter, uint32_t(from[4]), uint32_t(from[5]));
  Tensor out = empty({4}, in);
  for (int i = 0; i < 4; ++i) static_cast<int64_t*>(out.mutable_data_ptr())[i] = block.words[i];
  return out;
}
Tensor composed(const Tensor& x) {
  return call<Tensor>("cuda_ops::@", "", x, draw_key(x), 1.0);
}
}
CUDA_OPS(library) {
  library.op("@(Tensor x, Tensor key, float scale=1.0) -> Tensor", "(),[2]->()")
      .dtypes(kFloating).random("key").range("scale", 0.0, 10.0)
      .cpu<noise>().cuda<noise_cuda>();
  library.op("@_bits(Tensor x, Tensor key) -> Tensor", "(),[2]->()")
      .dtypes(kFloating).random("key").cpu<bits>().cuda<bits_cuda>();
  library.op("@_uniform(Tensor x, Tensor key) -> Tensor", "(),[2]->()")
      .dtypes(kFloating).random("key").cpu<uniform>().cuda<uniform_cuda>();
  library.op("@_normal(Tensor x, Tensor key) -> Tensor", "(),[2]->()")
      .dtypes(kFloating).random("key").cpu<normal>().cuda<normal_cuda>();
  library.op("@_below(Tensor x, Tensor key, int n) -> Tensor", "(),[2]->()")
      .dtypes(kFloating).random("key").range("n", 1, 1 << 20).cpu<below>().cuda<below_cuda>();
  library.op("@_words(Tensor given) -> Tensor", "[6]->[4]").dtypes(kInt64).cpu<words>();
  library.op("@_composed(Tensor x) -> Tensor", "()->()").dtypes(kFloating).composite<composed>();
}
"""

KERNEL = """
#include "random.cuh"
using namespace cuda_ops;
namespace {
struct Noise {
  Scalar scale;
  template <class C> __device__ C operator()(const Draw& draw, C x) const {
    return x + scale.as<C>() * draw.normal<C>();
  }
};
struct Bits {
  template <class C> __device__ C operator()(const Draw& draw, C) const { return C(draw.bits()); }
};
struct Uniform {
  template <class C> __device__ C operator()(const Draw& draw, C) const {
    return C(draw.uniform());
  }
};
struct Normal {
  template <class C> __device__ C operator()(const Draw& draw, C) const {
    return draw.normal<C>();
  }
};
struct Below {
  uint32_t n;
  template <class C> __device__ C operator()(const Draw& draw, C) const { return C(draw.below(n)); }
};
}
cudaError_t noise_launch(const Strided<2>& p, RandomKey k, double scale, cudaStream_t s) {
  return map_random_cuda(p, k, s, Noise{scale});
}
cudaError_t bits_launch(const Strided<2>& p, RandomKey k, cudaStream_t s) {
  return map_random_cuda(p, k, s, Bits{});
}
cudaError_t uniform_launch(const Strided<2>& p, RandomKey k, cudaStream_t s) {
  return map_random_cuda(p, k, s, Uniform{});
}
cudaError_t normal_launch(const Strided<2>& p, RandomKey k, cudaStream_t s) {
  return map_random_cuda(p, k, s, Normal{});
}
cudaError_t below_launch(const Strided<2>& p, RandomKey k, int64_t n, cudaStream_t s) {
  return map_random_cuda(p, k, s, Below{uint32_t(n)});
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_random", scratch_root)
    with scratch.built(BINDING.replace("@", scratch.name), kernel=KERNEL):
        yield scratch.name


on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
KEY = [0x0123456789ABCDEF, -0x0FEDCBA987654321]


def public(name: str) -> Callable[..., Any]:
    return registry().public(name)


def key_on(device: str, key: list[int] | None = None) -> torch.Tensor:
    return torch.tensor(key or KEY, device=device)


# --- the generator ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_words_are_those_that_the_authors_of_philox_publish(
    name: str, counter: list[int], key: list[int], expected: str
) -> None:
    wanted = [int(word, 16) for word in expected.split()]
    assert public(f"{name}_words")(torch.tensor([*counter, *key])).tolist() == wanted
    words = philox([torch.tensor(word) for word in counter], key)
    assert [int(word) for word in words] == wanted


@on_each_device
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (70_001,)])
def test_a_number_depends_on_the_key_and_the_place_alone(
    name: str, device: str, shape: tuple[int, ...]
) -> None:
    x, key = torch.zeros(shape, dtype=torch.float64, device=device), key_on(device)
    expected = random_bits(key.cpu(), shape).double()
    assert torch.equal(public(f"{name}_bits")(x, key=key).cpu(), expected)
    views = [torch.stack([x, x], dim)[(slice(None),) * dim + (0,)] for dim in range(x.dim() + 1)]
    if x.dim() > 1:
        views.append(x.mT.contiguous().mT)
    for view in views:
        assert torch.equal(public(f"{name}_bits")(view, key=key).cpu(), expected)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_neither_dtype_nor_alignment_changes_it(
    name: str, device: str, dtype: torch.dtype, start: int
) -> None:
    for numel in (1, 6, 1021, 40_003):
        x = torch.zeros(numel + start, dtype=dtype, device=device)[start:]
        key = key_on(device)
        actual = public(f"{name}_uniform")(x, key=key).cpu()
        assert torch.equal(actual, random_uniform(key.cpu(), (numel,)).float().to(dtype))


@on_each_device
def test_a_key_need_not_be_contiguous(name: str, device: str) -> None:
    x, key = torch.zeros(100, device=device), key_on(device)
    apart = torch.stack([key, key + 1], 1)[:, 0]
    function = public(f"{name}_bits")
    assert torch.equal(function(x, key=apart), function(x, key=key))
    twice = key[:1].expand(2)
    assert torch.equal(function(x, key=twice), function(x, key=twice.contiguous()))


# --- distributions: seeds are fixed, so that five standard deviations never fail by chance --------


def moments_agree(sample: torch.Tensor, mean: float, variance: float, fourth: float) -> None:
    """The fourth is the central moment, on which the error of the variance depends."""
    n, sample = sample.numel(), sample.double()
    assert abs(sample.mean() - mean) <= 5 * math.sqrt(variance / n)
    assert abs(sample.var() - variance) <= 5 * math.sqrt((fourth - variance**2) / n)


@on_each_device
def test_moments(name: str, device: str) -> None:
    x, key = torch.zeros(1 << 18, dtype=torch.float32, device=device), key_on(device)
    uniform = public(f"{name}_uniform")(x, key=key).cpu()
    assert uniform.min() >= 0 and uniform.max() < 1
    moments_agree(uniform, 0.5, 1 / 12, 1 / 80)
    normal = public(f"{name}_normal")(x, key=key).cpu()
    assert normal.abs().max() < 5.8
    moments_agree(normal, 0, 1, 3)
    assert abs((normal**3).mean()) < 5 * math.sqrt(15 / normal.numel())
    for n in (1, 2, 10, 1000):
        below = public(f"{name}_below")(x, n, key=key).cpu()
        assert below.min() == 0 and below.max() == n - 1
        variance = (n * n - 1) / 12
        moments_agree(below, (n - 1) / 2, variance, variance * (3 * n * n - 7) / 20 + 1e-3)
    counts = torch.bincount(public(f"{name}_below")(x, 10, key=key).cpu().long())
    expected = x.numel() / 10
    assert ((counts - expected) ** 2 / expected).sum() < 33.7  # chi-squared, 9 degrees, 1e-4


@on_each_device
def test_normal_numbers_are_those_of_float64(name: str, device: str) -> None:
    wide, key = torch.zeros(4096, dtype=torch.float64), key_on("cpu")
    expected = public(f"{name}_normal")(wide, key=key)
    for dtype, error in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        x = torch.zeros(4096, dtype=dtype, device=device)
        actual = public(f"{name}_normal")(x, key=key.to(device)).cpu().double()
        torch.testing.assert_close(actual, expected, rtol=error, atol=error)


# --- when a key is drawn --------------------------------------------------------------------------


@on_each_device
def test_the_key_is_drawn_by_torch_s_generator(name: str, device: str) -> None:
    x = torch.zeros(1000, device=device)
    torch.manual_seed(3)
    drawn = public(name)(x, 2.0), public(name)(x, 2.0)
    torch.manual_seed(3)
    keys = draw_key(x), draw_key(x)
    for result, key in zip(drawn, keys, strict=True):
        assert torch.equal(result, public(name)(x, 2.0, key=key))
        assert torch.equal(result, getattr(torch.ops.cuda_ops, name)(x, key, 2.0))
    assert not torch.equal(*drawn)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        before = public(name)(x)
    assert torch.equal(public(name)(x), before)


def test_a_composed_operator_draws_too(name: str) -> None:
    x = torch.zeros(100)
    composed = public(f"{name}_composed")
    torch.manual_seed(1)
    first = composed(x)
    assert not torch.equal(first, composed(x))
    torch.manual_seed(1)
    assert torch.equal(composed(x), first)
    stacked = torch.zeros(2, 100)
    for randomness, alike in (("same", True), ("different", False)):
        a, b = torch.vmap(composed, randomness=randomness)(stacked)
        assert torch.equal(a, b) is alike
    # Before torch 2.13 its C interface does not say why a part failed.
    with pytest.raises(RuntimeError, match=r"randomness|failed to run aten::randint_like"):
        torch.vmap(composed)(stacked)
    compiled = torch.compile(composed, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x), compiled(x))


def test_dispatched_calls_need_a_key(name: str) -> None:
    with pytest.raises(RuntimeError, match="missing value for argument 'key'"):
        getattr(torch.ops.cuda_ops, name)(torch.zeros(3))


def test_wrong_keys_and_numbers_are_refused_by_name(name: str) -> None:
    function, x = public(name), torch.zeros(3)
    for key, expected in (
        (torch.zeros(2), "'key': expected dtype int64, got float32"),
        (torch.zeros(3, dtype=torch.int64), r"'key': expected dim '2' of \[2\] to be 2"),
        (torch.zeros(1, 2, dtype=torch.int64), r"'key': expected exactly the dims \[2\]"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "'key': expected a tensor on cpu"),
        ("no tensor", "'key': expected a tensor or None, got str"),
    ):
        with pytest.raises(RuntimeError, match=expected):
            function(x, key=key)
    with pytest.raises(RuntimeError, match="'x': expected a tensor, got None"):
        function(None)
    for device, scale in itertools.product(("cpu", "meta"), (-0.5, 10.5, math.nan)):
        with pytest.raises(RuntimeError, match=f"'scale': expected from 0 to 10, got {scale:g}"):
            function(x.to(device), scale)


def test_an_fx_proxy_records_one_call(name: str) -> None:
    function = public(name)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x, 2.0)

    traced = torch.fx.symbolic_trace(Module())
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert len(calls) == 1
    x = torch.zeros(100)
    assert not torch.equal(traced(x), traced(x))


def test_ranks_that_share_a_tensor_get_one_key(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    key = draw_key(distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()]))
    assert key.placements == (Replicate(),)  # type: ignore[attr-defined]
    result = public(name)(distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()]))
    assert result.placements == (Replicate(),) and result.shape == (4, 3)


@pytest.mark.slow
def test_inductor_draws_anew_for_each_call(name: str) -> None:
    function, x = public(name), torch.zeros(1000)
    compiled = torch.compile(lambda x: (function(x), function(x)), fullgraph=True)
    (a, b), (c, _) = compiled(x), compiled(x)
    assert not torch.equal(a, b) and not torch.equal(a, c)


@needs_gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch begins with one, and says so
def test_compiled_cuda_graphs_draw_anew(name: str) -> None:
    function, x = public(name), torch.zeros(1000, device="cuda")
    compiled = torch.compile(lambda x: function(x) * 2, fullgraph=True, mode="reduce-overhead")
    drawn = [compiled(x).clone() for _ in range(5)]
    for a, b in itertools.combinations(drawn, 2):
        assert not torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_draws_the_same(name: str, reentrant: bool) -> None:
    function, x = public(f"{name}_uniform"), torch.zeros(1000)
    weight = torch.ones(1000, requires_grad=True)
    result = checkpoint(lambda w: w * function(x) ** 2, weight, use_reentrant=reentrant)
    result.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, result.detach())


def test_every_check_passes(name: str) -> None:
    report = check_op(name, profile=PROFILES["quick"], isolate=False)
    assert report.passed, str(report)
    passed = {entry.check for entry in report.entries if entry.passed}
    assert {"draws", "independence"} <= passed


# --- what a binding may say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "line", "extra", "expected"),
    [
        ("(Tensor x, Tensor key) -> Tensor", "(),()->()", "", r"expected \[2\] in the signature"),
        ("(Tensor x, Tensor seed) -> Tensor", "(),[2]->()", "", "expected 'x' or 'seed', which"),
        ("(Tensor key, Tensor x) -> Tensor", "[2],()->()", "", "expected a tensor before"),
        ("(Tensor? x, Tensor key) -> Tensor", "(),[2]->()", "", "expected a tensor before"),
        ("(Tensor x, Tensor? key) -> Tensor", "(),[2]->()", "", "expected a Tensor, as .random"),
        (
            "(Tensor x, Tensor key, float p) -> Tensor", "(),[2]->()",
            '.range("p", 1.0, 0.0)', "expected the smaller number first in .range",
        ),
    ],
)  # fmt: skip
def test_a_binding_that_cannot_be_meant_is_refused(
    scratch_op: ScratchOp, schema: str, line: str, extra: str, expected: str
) -> None:
    first, second = (
        f"const {'std::optional<Tensor>' if f'Tensor? {name}' in schema else 'Tensor'}&"
        for name in ("x", "key")
    )
    more = ", double" if "float" in schema else ""
    scratch_op.binding.write_text(f"""
#include "binding.h"
using namespace cuda_ops;
namespace {{
Tensor f({first}, {second}{more}) {{ throw OpError("never called"); }}
}}
CUDA_OPS(library) {{
  library.op("{scratch_op.name}{schema}", "{line}").dtypes(kFloating).random("key"){extra}.cpu<f>();
}}
""")
    built = scratch_op.build()
    with pytest.raises(ManifestError, match=expected):
        library.open_library(built.path, scratch_op.name)
