"""fused_linear_gelu: both ways to a gradient, of any order, batched and sharded."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Recorder, needs_gpu
from gemm_cases import Case, Plans, anything, families, planner, smallest

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import find


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("fused_linear_gelu", "matmul", "sum_rows", "gelu_approx")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
either = pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def tensors(device: str, dtype: torch.dtype, *sizes: int, bias: bool = True) -> list[torch.Tensor]:
    rows, o, i = sizes
    x, weight = torch.randn(2, rows, i), torch.randn(o, i) / i**0.5
    made = [x, weight, torch.randn(o)] if bias else [x, weight]
    return [tensor.to(device, dtype).requires_grad_() for tensor in made]


# Rows, O and I: vectors, narrow and wide tiles, and sizes that no vector fits.
@pytest.mark.parametrize(
    "sizes", [(1, 64, 64), (5, 72, 40), (33, 130, 64), (300, 1032, 520), (7, 5, 3), (129, 257, 65)]
)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [True, False])
@either
@on_each_device
@pytest.mark.quick(8)
def test_values_and_gradients(
    sizes: tuple[int, ...], dtype: torch.dtype, bias: bool, keep: bool, device: str
) -> None:
    agrees_with_float64(tensors(device, dtype, *sizes, bias=bias), keep)


# Lines of 2049 start anywhere: on Hopper GPUs both operands are copied first.
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@either
def test_lines_that_are_no_vectors(dtype: torch.dtype, keep: bool) -> None:
    agrees_with_float64(tensors("cuda", dtype, 1025, 1100, 2049), keep)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    return planner(tmp_path_factory)


@pytest.fixture(scope="module")
def cases_of_kernels(plans: Plans) -> dict[str, Case]:
    return smallest(plans, linear=True)


@pytest.mark.slow
def test_every_tile_of_a_layer_is_chosen_somewhere(cases_of_kernels: dict[str, Case]) -> None:
    streams = [f"stream {swap}8 splits {n}" for n in (1, 2, 4, 8) for swap in ("", "swapped ")]
    narrow = [f"{swap}128x{tile}" for tile in (16, 64) for swap in ("", "swapped ")]
    wide = [f"128x{tile}" for tile in (128, 160, 224, 256)]
    pairs = [f"hopper {tile} splits 1 pairs" for tile in wide]
    for dtype in (torch.bfloat16, torch.float16):
        for kernel in (*streams, *pairs, "mma 64", "mma 128"):
            assert f"{kernel}, {dtype}, ieee" in cases_of_kernels
        for tile in (*narrow, *wide):
            pattern = re.compile(rf"hopper {tile} splits \d, {dtype}")
            assert any(pattern.match(kernel) for kernel in cases_of_kernels), tile
    for kernel in ("gemv", "gemv swapped", "fma 128x128", "fma 64x64"):
        assert f"{kernel}, torch.float32, ieee" in cases_of_kernels


@pytest.mark.parametrize("name", ["", "_keep", "_slope"])
@pytest.mark.slow
def test_the_sanitizer_is_shown_every_family(plans: Plans, name: str) -> None:
    def case_of(sample: Sample) -> Case:
        x, weight = sample.tensors[-3:-1]
        layouts = "".join("lk"[t.layout == "contiguous"] for t in (x, weight))
        return Case(x.shape[0], weight.shape[0], x.shape[1], layouts, x.dtype)

    samples = find(f"fused_linear_gelu{name}").kernel_samples
    shown = families(plans, [case_of(sample) for sample in samples], linear=True)
    assert families(plans, anything(linear=True), linear=True) <= shown


@needs_gpu
def test_every_kernel_agrees_with_float64(cases_of_kernels: dict[str, Case]) -> None:
    # Elsewhere a case would not run the kernel that it is there for.
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the cases are chosen for compute capability 9.0")
    ops, failed = torch.ops.cuda_ops, []
    for kernel, case in cases_of_kernels.items():
        x, weight = case.operands()
        weight = weight.mul_(case.k**-0.5).mT
        bias, grad = (torch.randn(s, device="cuda").to(case.dtype) for s in (case.n, x.shape[0]))
        grad = grad.unsqueeze(-1).expand(-1, case.n).contiguous()
        sums = F.linear(*(t.double() for t in (x, weight, bias))).requires_grad_()
        exact = F.gelu(sums, approximate="tanh")
        (slope,) = torch.autograd.grad(exact, sums, grad.double())
        out = ops.fused_linear_gelu(x, weight, bias)
        kept = ops.fused_linear_gelu_keep(x, weight, bias)
        actual = [out, *kept, ops.fused_linear_gelu_slope(grad, x, weight, bias)]
        for ours, theirs in zip(actual, [exact, exact, sums, slope], strict=True):
            error = (ours.double() - theirs).norm() / theirs.norm()
            if not error <= ROUNDING[case.dtype]:
                failed.append(f"{case}: {kernel}: {float(error):.2e}")
    assert not failed, "\n".join(failed)


def agrees_with_float64(inputs: list[torch.Tensor], keep: bool) -> None:
    dtype = inputs[0].dtype
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, exact = (
        cuda_ops.fused_linear_gelu(*inputs, save_preactivation=keep),
        reference(*exact_inputs),
    )
    grad = torch.randn_like(out)
    actual = [out, *torch.autograd.grad(out, inputs, grad)]
    expected = [exact, *torch.autograd.grad(exact, exact_inputs, grad.double())]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype is dtype and ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= ROUNDING[dtype] * theirs.norm()


@either
def test_derivatives_of_any_order(keep: bool) -> None:
    inputs = tensors("cpu", torch.float64, 2, 3, 4)

    def function(*args: torch.Tensor) -> torch.Tensor:
        return cuda_ops.fused_linear_gelu(*args, save_preactivation=keep)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@either
@on_each_device
def test_one_row_and_weights_of_their_own(keep: bool, device: str) -> None:
    x, weight, bias = tensors(device, torch.float64, 3, 5, 4)

    def function(*args: torch.Tensor) -> torch.Tensor:
        return cuda_ops.fused_linear_gelu(*args, save_preactivation=keep)

    torch.testing.assert_close(function(x[0, 0], weight, bias), reference(x[0, 0], weight, bias))
    torch.testing.assert_close(
        torch.vmap(function, in_dims=(0, None, None))(x, weight, bias), reference(x, weight, bias)
    )
    weights = torch.stack([weight, 2 * weight])
    each = torch.vmap(function, in_dims=(0, 0, None))(x, weights, bias)
    expected = torch.stack([reference(x[i], weights[i], bias) for i in range(2)])
    torch.testing.assert_close(each, expected)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        ((5, 4), (3, 4), (5, 3)),
        ((5, 4), (3, 4), (1, 3)),
        ((5, 0), (3, 0), (3,)),
        ((4,), (0, 4), (0,)),
    ],
    ids=str,
)
@either
def test_gradients_of_biases_for_each_row_and_of_nothing(
    x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...], keep: bool
) -> None:
    inputs = [
        torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in (x, weight, bias)
    ]
    out = cuda_ops.fused_linear_gelu(*inputs, save_preactivation=keep)
    expected = F.gelu(inputs[0] @ inputs[1].mT + inputs[2], approximate="tanh")
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )


def test_a_flag_that_is_no_bool_is_refused() -> None:
    keep: Any = "no"
    text = "fused_linear_gelu: argument 'save_preactivation': expected a bool, got str"
    with pytest.raises(RuntimeError, match=text):
        cuda_ops.fused_linear_gelu(torch.ones(2, 4), torch.ones(3, 4), save_preactivation=keep)


@either
def test_compiled(keep: bool) -> None:
    inputs = tensors("cpu", torch.float32, 3, 8, 4)

    def loss(*args: torch.Tensor) -> torch.Tensor:
        return cuda_ops.fused_linear_gelu(*args, save_preactivation=keep).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*inputs), inputs)
    theirs = torch.autograd.grad(reference(*inputs).square().sum(), inputs)
    torch.testing.assert_close(ours, theirs)


def test_keeping_is_for_gradients_alone() -> None:
    inputs = tensors("cpu", torch.float32, 3, 8, 4)
    frozen = [tensor.detach() for tensor in inputs]
    with Recorder() as calls:
        with torch.no_grad():
            kept = cuda_ops.fused_linear_gelu(*inputs, save_preactivation=True)
        cuda_ops.fused_linear_gelu(*frozen, save_preactivation=True)
    assert calls.results("fused_linear_gelu") == [kept.shape] * 2
    assert calls.results("fused_linear_gelu_keep") == []
    torch.testing.assert_close(kept, reference(*inputs))


def test_a_bias_may_be_none_and_nothing_else() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="'bias': expected a tensor or None, got list"):
        cuda_ops.fused_linear_gelu(x, weight, [0.0] * 4)


def test_kept_is_what_the_gradients_that_are_wanted_need() -> None:
    inputs = [tensor.detach() for tensor in tensors("cpu", torch.float32, 3, 8, 4)]
    x, weight, _ = inputs
    for wanted, expected in ((x, [weight]), (weight, [x]), (inputs[2], [])):
        saved: list[torch.Tensor] = []
        args = [t.detach().requires_grad_(t is wanted) for t in inputs]
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
            cuda_ops.fused_linear_gelu(*args, save_preactivation=True)
        kept = {tensor.data_ptr() for tensor in inputs}
        assert [t.data_ptr() for t in saved if t.data_ptr() in kept] == [
            tensor.data_ptr() for tensor in expected
        ]


def test_the_weights_gradient_is_one_product() -> None:
    x, weight, bias = (t.detach() for t in tensors("cpu", torch.float32, 6, 8, 4))
    weight.requires_grad_()
    out = cuda_ops.fused_linear_gelu(x, weight, bias, save_preactivation=True)
    with Recorder() as calls:
        torch.autograd.grad(out, weight, torch.randn_like(out))
    assert calls.results("matmul") == [weight.shape] and calls.results("sum") == []


def test_shards_rows_and_columns(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    for places, expected in (
        ((Shard(0), Replicate(), Replicate()), Shard(0)),
        ((Replicate(), Shard(0), Shard(0)), Shard(1)),
    ):
        locals_ = (torch.randn(4, 6), torch.randn(8, 6), torch.randn(8))
        args = [
            DTensor.from_local(tensor, mesh, [place], run_check=False)
            for tensor, place in zip(locals_, places, strict=True)
        ]
        with CommDebugMode() as communication:
            out = cuda_ops.fused_linear_gelu(*args)
        assert communication.get_total_counts() == 0
        assert out.placements == (expected,)
        torch.testing.assert_close(out.to_local(), reference(*locals_))
