"""cumulative_sum against torch: any dim, layout and dtype, every path of the kernels, gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_ops
from cuda_ops.compile_ops import reload


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("cumulative_sum")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32]
on_each_device = pytest.mark.parametrize("device", DEVICES)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "rows left out": lambda x: x.repeat_interleave(2, 0)[::2],
    "part of longer rows": lambda x: F.pad(x, (3, 5))[..., 3:-5],
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "an odd start": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape),
}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(device, dtype)
    return torch.randint(-9, 10, shape, generator=generator).to(device, dtype)


def exact(x: torch.Tensor, dim: int, reverse: bool = False) -> torch.Tensor:
    wide = x.double() if x.dtype.is_floating_point else x
    return wide.flip(dim).cumsum(dim).flip(dim) if reverse else wide.cumsum(dim)


def agrees(actual: torch.Tensor, x: torch.Tensor, dim: int, reverse: bool = False) -> None:
    expected = exact(x, dim, reverse)
    assert actual.shape == x.shape
    if not x.dtype.is_floating_point:
        assert actual.dtype is torch.int64
        assert torch.equal(actual, expected)
        return
    assert actual.dtype is x.dtype
    if x.numel() == 0:
        return
    summed = torch.float64 if x.dtype is torch.float64 else torch.float32
    # Each sum is as wrong as the largest of the partial sums that it was made of.
    size = exact(x.abs(), dim, reverse).max().item()
    atol = 8 * torch.finfo(summed).eps * size + (2**-24 if x.dtype is torch.float16 else 0)
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(x.dtype).eps, atol=atol)


@on_each_device
@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(
        st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 32, 64, 100, 257])),
        min_size=1, max_size=4,
    ).filter(lambda shape: torch.Size(shape).numel() < 40_000),
    dim=st.integers(-4, 3),
    dtype=st.sampled_from(FLOATING + INTEGERS),
    view=st.sampled_from(sorted(VIEWS)),
    reverse=st.booleans(),
)  # fmt: skip
def test_it_agrees_with_torch(
    device: str, shape: list[int], dim: int, dtype: torch.dtype, view: str, reverse: bool
) -> None:
    dim %= len(shape)
    x = VIEWS[view](drawn((*shape,), dtype, device, len(shape)))
    actual = cuda_ops.cumulative_sum(x, dim, reverse)
    agrees(actual, x, dim, reverse)
    dense = view in ("dense", "transposed", "an odd start")
    assert not dense or actual.stride() == x.stride() or x.numel() < 2
    fake = cuda_ops.cumulative_sum(x.to("meta"), dim, reverse)
    if dense:
        assert fake.stride() == actual.stride() and fake.dtype == actual.dtype


#: Around packs, warps, what a block holds of 4, 2 and 8 bytes, and several parts.
LENGTHS = [
    1,
    2,
    3,
    4,
    5,
    8,
    9,
    127,
    128,
    129,
    512,
    2047,
    4096,
    4097,
    8192,
    8193,
    16384,
    16385,
    70_001,
]


@on_each_device
@pytest.mark.parametrize("n", LENGTHS)
def test_rows_of_any_length(n: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for rows in (1, 3, 70):
            x = drawn((rows, n), dtype, device, n)
            for reverse in (False, True):
                agrees(cuda_ops.cumulative_sum(x, -1, reverse), x, 1, reverse)
                part = x[:, n // 3 :]
                agrees(cuda_ops.cumulative_sum(part, -1, reverse), part, 1, reverse)


@on_each_device
@pytest.mark.parametrize("inner", [2, 3, 4, 8, 24, 31, 32, 33, 128, 132, 257])
@pytest.mark.parametrize("n", [1, 7, 32, 33, 129, 511, 513, 4097])
def test_columns_of_any_length(n: int, inner: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for outer in (1, 3):
            x = drawn((outer, n, inner), dtype, device, n)
            for reverse in (False, True):
                agrees(cuda_ops.cumulative_sum(x, 1, reverse), x, 1, reverse)
        part = x[:, :, 1:]
        agrees(cuda_ops.cumulative_sum(part, 1), part, 1)


@on_each_device
def test_nothing_and_one_number(device: str) -> None:
    for shape in ((0,), (3, 0), (0, 3), (2, 0, 3)):
        for dim in range(len(shape)):
            x = torch.ones(shape, device=device, requires_grad=True)
            out = cuda_ops.cumulative_sum(x, dim)
            assert out.shape == x.shape
            out.sum().backward()
    for dim in (0, -1):
        x = torch.tensor(2.5, device=device, requires_grad=True)
        out = cuda_ops.cumulative_sum(x, dim)
        assert out.shape == () and out.item() == 2.5
        out.backward()
        assert x.grad is not None and x.grad.item() == 1


@on_each_device
def test_gradcheck(device: str) -> None:
    for shape, dim in (((5,), 0), ((3, 4), 0), ((3, 4), -1), ((2, 3, 4), 1)):
        x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for reverse in (False, True):
            assert torch.autograd.gradcheck(
                lambda v, d=dim, r=reverse: cuda_ops.cumulative_sum(v, d, r), x
            )
            assert torch.autograd.gradgradcheck(
                lambda v, d=dim, r=reverse: cuda_ops.cumulative_sum(v * v, d, r), x
            )


@on_each_device
def test_the_gradient_of_long_lines(device: str) -> None:
    x = drawn((2, 300, 40), torch.float32, device).requires_grad_()
    grad = drawn((2, 300, 40), torch.float32, device, 1)
    for dim in range(3):
        (actual,) = torch.autograd.grad(cuda_ops.cumulative_sum(x, dim), x, grad)
        agrees(actual, grad, dim, reverse=True)


@on_each_device
def test_special_numbers_stay_in_their_row(device: str) -> None:
    x = torch.ones(5, 100, device=device)
    x[1, 50], x[3, 20] = float("nan"), float("inf")
    out = cuda_ops.cumulative_sum(x)
    assert torch.equal(out.isnan(), x.cumsum(-1).isnan())
    assert torch.equal(out.isinf(), x.cumsum(-1).isinf())
    assert torch.equal(out[[0, 2, 4]], x.cumsum(-1)[[0, 2, 4]])


@on_each_device
def test_integers_wrap_around(device: str) -> None:
    x = torch.full((3,), 2**62, device=device)
    assert torch.equal(cuda_ops.cumulative_sum(x), x.cumsum(0))
    wide = torch.full((3,), 2**31 - 1, dtype=torch.int32, device=device)
    assert cuda_ops.cumulative_sum(wide).tolist() == [2**31 - 1, 2**32 - 2, 3 * (2**31 - 1)]


@on_each_device
def test_halves_are_summed_in_float32(device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.ones(4096, dtype=dtype, device=device)
        assert torch.equal(
            cuda_ops.cumulative_sum(x), torch.arange(1, 4097, device=device).to(dtype)
        )


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_what_is_refused(device: str) -> None:
    x = torch.ones(2, 3, device=device)
    for dim in (2, -3):
        with pytest.raises(RuntimeError, match=f"'dim': expected a dim from -2 to 1, got {dim}"):
            cuda_ops.cumulative_sum(x, dim)
    for dtype in (torch.bool, torch.int8, torch.complex64):
        with pytest.raises(RuntimeError, match="argument 'x': expected dtype float64"):
            cuda_ops.cumulative_sum(x.to(dtype))


def test_vmap() -> None:
    x = drawn((3, 4, 5), torch.float32, "cpu")
    for at in range(3):
        for dim in (0, 1, -1):
            actual = torch.vmap(lambda v, d=dim: cuda_ops.cumulative_sum(v, d), in_dims=at)(x)
            torch.testing.assert_close(actual, torch.vmap(lambda v, d=dim: v.cumsum(d), at)(x))
    assert torch.equal(torch.vmap(cuda_ops.cumulative_sum)(x[0, 0]), x[0, 0])


def test_compiled() -> None:
    x = drawn((3, 5), torch.float32, "cpu").requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (cuda_ops.cumulative_sum(x * 2, 0) * x).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), loss(x))
    pairs = [torch.autograd.grad(f(x), x)[0] for f in (compiled, loss)]
    torch.testing.assert_close(*pairs)


# --- on a GPU alone ------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize(("shape", "dim"), [((1, 1 << 24), 1), ((7, 1 << 20), 1), ((1 << 20, 8), 0),
                                            ((1 << 14, 512), 0)])  # fmt: skip
def test_the_same_bits_every_time(shape: tuple[int, ...], dim: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(shape, device="cuda").to(dtype)
        first = cuda_ops.cumulative_sum(x, dim)
        agrees(first, x, dim)
        for _ in range(20):
            assert torch.equal(cuda_ops.cumulative_sum(x, dim), first)


@needs_gpu
def test_in_a_cuda_graph() -> None:
    x = torch.randn(2, 1 << 20, device="cuda")
    cuda_ops.cumulative_sum(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, columns = cuda_ops.cumulative_sum(x), cuda_ops.cumulative_sum(x.view(-1, 8), 0)
    for _ in range(3):
        x.normal_()
        graph.replay()
        agrees(rows, x, 1)
        agrees(columns, x.view(-1, 8), 0)


@needs_gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.ones(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    x[1:] = 0
    x[2**31 :] = 1
    assert cuda_ops.cumulative_sum(x)[-6:].tolist() == [1, 2, 3, 4, 5, 6]
    rows = x[: 2**31].view(-1, 256)
    assert cuda_ops.cumulative_sum(rows)[0].tolist() == [1] * 256
    assert not cuda_ops.cumulative_sum(rows)[-1].any()
    assert cuda_ops.cumulative_sum(rows, 0)[-1].sum().item() == 1
