"""sum_rows and reduce_sum: determinism, precision, gradients, and every path of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_gpu

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.dispatch import by_torch


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("sum_rows", "reduce_sum")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
on_each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", FLOATING)
both = pytest.mark.parametrize("name", ["sum_rows", "reduce_sum"])


def exact_sum(name: str, x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide.sum(-1) if name == "sum_rows" else wide.sum()


def agrees(name: str, x: torch.Tensor) -> None:
    """Within the rounding of the result, and of the additions: a few steps of their magnitudes."""
    actual, exact = getattr(cuda_ops, name)(x), exact_sum(name, x)
    assert actual.dtype == x.dtype and actual.shape == exact.shape and actual.is_contiguous()
    summed = torch.float64 if x.dtype is torch.float64 else torch.float32
    allowed = torch.finfo(x.dtype).eps * exact.abs()
    allowed = allowed + 8 * torch.finfo(summed).eps * exact_sum(name, x.abs()) + 1e-30
    assert ((actual.double() - exact).abs() <= allowed).all()


# Rows and their length: each path of the kernels and its borders.
SHAPES = [
    (5, 1), (1000, 1), (7, 2), (4099, 3), (300, 4), (4099, 7), (257, 8), (100, 16), (1031, 31),
    (64, 32), (129, 33), (65, 64), (33, 100), (17, 127), (40, 255), (40, 256), (9, 257), (9, 511),
    (9, 512), (5, 513), (3, 1024), (1200, 1000), (3, 1023), (2000, 2048), (3, 4097), (300, 5000),
    (2, 65536), (3, 100003), (1, 1 << 20), (1, (1 << 20) + 1), (31, 40000),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dtype
@both
@on_each_device
def test_sums(name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    agrees(name, torch.randn(shape, generator=generator).to(device, dtype))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(-1, -2),
    "stepped": lambda x: x[..., ::2],
    "sliced": lambda x: x[..., 1:-2],
    "rows left out": lambda x: x[:, ::3],
    "first dims last": lambda x: x.permute(2, 0, 1),
    "middle last": lambda x: x.permute(0, 2, 1),
    "odd start": lambda x: x.flatten()[1:-1].view(2, -1),
    "expanded rows": lambda x: x[:1].expand(5, -1, -1),
    "expanded last": lambda x: x[..., :1].expand(-1, -1, 9),
    "no dims but one": lambda x: x[0, 0],
    "long, stepped": lambda x: x.flatten()[::2],
    "few long rows, stepped": lambda x: x.flatten()[::2].view(2, -1),
    "columns": lambda x: x.flatten(0, 1).t(),
}


@pytest.mark.parametrize("view", VIEWS)
@each_dtype
@both
@on_each_device
def test_sums_of_any_layout(name: str, dtype: torch.dtype, view: str, device: str) -> None:
    x = torch.randn(4, 150, 204, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    agrees(name, VIEWS[view](x))


def test_the_total_of_many_rows_that_are_no_line() -> None:
    x = torch.randn(300, 200, 6)[..., :2]  # 60000 partial sums
    agrees("reduce_sum", x)
    if torch.cuda.is_available():
        agrees("reduce_sum", x.cuda())
        agrees("reduce_sum", x.cuda().bfloat16())


@both
@on_each_device
def test_nothing_adds_up_to_zero(name: str, device: str) -> None:
    for shape in [(0,), (3, 0), (0, 3), (2, 0, 3)]:
        x = torch.empty(shape, device=device)
        expected = x.sum(-1) if name == "sum_rows" else x.sum()
        assert torch.equal(getattr(cuda_ops, name)(x), expected)
    if name == "reduce_sum":
        assert cuda_ops.reduce_sum(torch.tensor(3.0, device=device)).item() == 3
    else:
        with pytest.raises(RuntimeError, match=r"argument 'x': expected at least 1 dims"):
            cuda_ops.sum_rows(torch.tensor(3.0, device=device))


@pytest.mark.parametrize("n", [5, 64, 5000, 300_000])
@on_each_device
def test_nan_and_infinities_spread_to_their_row_alone(n: int, device: str) -> None:
    x = torch.ones(4, n)
    x[0, n // 2], x[1, n - 1] = float("nan"), float("inf")
    x[2, 0], x[2, 1] = float("inf"), float("-inf")
    actual = cuda_ops.sum_rows(x.to(device)).cpu()
    expected = torch.tensor([float("nan"), float("inf"), float("nan"), float(n)])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert cuda_ops.reduce_sum(x.to(device)).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both
@on_each_device
def test_halves_are_summed_in_float32(name: str, dtype: torch.dtype, device: str) -> None:
    # In the dtype itself 2048 + 1 = 2048 (bfloat16: 256), and 32768 * 4 overflows.
    ones = torch.ones(1, 40_000, dtype=dtype, device=device)
    assert getattr(cuda_ops, name)(ones).item() == torch.tensor(40_000.0).to(dtype).item()
    wave = torch.tensor([32768.0, 32768.0, -32768.0, -32768.0], dtype=dtype, device=device)
    assert getattr(cuda_ops, name)(wave.repeat(1, 2500)).item() == 0


@pytest.mark.parametrize("shape", [(4096, 31), (300, 1000), (3, 1 << 20), (1, 1 << 24)], ids=str)
@both
@on_each_device
def test_the_same_bits_every_time(name: str, shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    function = getattr(cuda_ops, name)
    first = function(x)
    for _ in range(10):
        assert torch.equal(function(x.clone()), first)


def test_the_number_of_threads_changes_nothing() -> None:
    x = torch.randn(3, 200_000)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with by_torch.kernels(False):  # torch splits a sum among its threads
                results.append((cuda_ops.sum_rows(x), cuda_ops.reduce_sum(x)))
    finally:
        torch.set_num_threads(threads)
    for rows, total in results:
        assert torch.equal(rows, results[0][0]) and torch.equal(total, results[0][1])


# --- gradients, batching, sharding ---------------------------------------------------------


@both
@on_each_device
def test_first_and_second_derivatives(name: str, device: str) -> None:
    function = getattr(cuda_ops, name)
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(lambda v: function(v * v), x)
    (gradient,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
    hessian = torch.func.jacrev(torch.func.grad(lambda v: function(v * v).sum()))(x)
    assert torch.equal(hessian.reshape(15, 15), 2 * torch.eye(15, dtype=x.dtype, device=device))


@both
@on_each_device
def test_the_gradient_takes_no_memory(name: str, device: str) -> None:
    x = torch.randn(4, 1000, device=device, requires_grad=True)
    out = getattr(cuda_ops, name)(x)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert gradient.shape == x.shape and gradient.untyped_storage().nbytes() <= 4 * 4


@on_each_device
def test_total_per_sample(device: str) -> None:
    x = torch.randn(4, 5, 6, device=device)
    for dim in range(3):
        expected = x.movedim(dim, 0).flatten(1).sum(1)
        torch.testing.assert_close(torch.vmap(cuda_ops.reduce_sum, in_dims=dim)(x), expected)
    scalars = torch.randn(7, device=device)
    assert torch.equal(torch.vmap(cuda_ops.reduce_sum)(scalars), scalars)
    per_sample = torch.vmap(torch.func.grad(lambda v: cuda_ops.reduce_sum(v * v)))(x)
    torch.testing.assert_close(per_sample, 2 * x)


@both
def test_autocast_sums_in_float32(name: str) -> None:
    x = torch.full((1, 4096), 0.1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = getattr(cuda_ops, name)(x)
    assert actual.dtype is torch.float32
    assert abs(actual.item() - x.double().sum().item()) < 1e-3


@both
def test_a_sharded_row_gives_a_partial_sum(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    local = torch.randn(4, 3)
    x = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    with CommDebugMode() as communication:
        out = getattr(cuda_ops, name)(x)
    assert communication.get_total_counts() == 0
    assert out.placements == (Partial(),)
    assert torch.equal(out.to_local(), getattr(cuda_ops, name)(local))


# --- on a GPU alone ---------------------------------------------------------------------------


@needs_gpu
@both
def test_in_a_cuda_graph(name: str) -> None:
    function = getattr(cuda_ops, name)
    x = torch.randn(3, 1 << 20, device="cuda")
    function(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(x)
    x.copy_(torch.randn(3, 1 << 20))
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, function(x))


@needs_gpu
@both
def test_more_than_2_to_the_31_elements(name: str) -> None:
    part = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    x = part.repeat(2049)
    assert x.numel() > 2**31
    exact = part.double().sum() * 2049
    actual = getattr(cuda_ops, name)(x).double()
    assert (actual - exact).abs() <= 2**-7 * exact.abs()
    rows = cuda_ops.sum_rows(x.view(-1, 16))
    torch.testing.assert_close(rows[-65536:], part.view(-1, 16).float().sum(-1).bfloat16())
    steps = x.view(2049, 1 << 20)[:, 1:]
    torch.testing.assert_close(cuda_ops.sum_rows(steps)[-1], part[1:].float().sum().bfloat16())
