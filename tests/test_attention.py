"""attention against torch's, for any shape, layout, dtype and scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
    reload("attention")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
HALVES = [torch.bfloat16, torch.float16]
FLOATING = [torch.float64, torch.float32, *HALVES]
on_each_device = pytest.mark.parametrize("device", DEVICES)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "heads between rows": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3),
    "part of longer rows": lambda x: F.pad(x, (8, 8))[..., 8:-8],
    "an odd part": lambda x: F.pad(x, (3, 5))[..., 3:-5],
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns": lambda x: x.mT.contiguous().mT,
    "rows left out": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
}


def torch_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """torch's own, in float64 on the CPU."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[-3] != k.shape[-3]
        )


def drawn(
    batch: tuple[int, ...],
    heads: tuple[int, int],
    m: int,
    n: int,
    d: int,
    dtype: torch.dtype,
    device: str,
    view: str = "dense",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * m + n)
    shapes = (*batch, heads[0], m, d), (*batch, heads[1], n, d), (*batch, heads[1], n, d)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v = (VIEWS[view](x.to(device, dtype)) for x in made)
    return q, k, v


def agrees(
    actual: torch.Tensor, expected: torch.Tensor, terms: float = 1, least: float = 1e-3
) -> None:
    """Within a few roundings of numbers of the size of the largest one, or of ``least``."""
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    bound = 4 * eps if eps > 1e-4 else 64 * eps
    atol = bound * terms * max(least, expected.abs().max().item())
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=bound, atol=atol)


def gradients(
    function: Callable[..., torch.Tensor], tensors: Any, grad: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves, *args), leaves, grad)


def gradients_agree(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(q)
    actual = gradients(cuda_ops.attention, (q, k, v), grad, *args)
    wide = [x.cpu().double() for x in (q, k, v)]
    expected = gradients(torch_math, wide, grad.cpu().double(), *args)
    for one, other, like in zip(actual, expected, (q, k, v), strict=True):
        assert one.dtype == like.dtype and one.shape == like.shape
        agrees(one, other, terms=4, least=0.5)  # differences of such numbers may be next to 0


sides = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 150, 200]))
dims = st.sampled_from([1, 3, 8, 16, 33, 40, 64, 72, 80, 96, 127, 128, 136, 256])
grouped = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)])


@on_each_device
@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(st.integers(1, 2), max_size=2).map(tuple),
    heads=grouped,
    m=sides,
    n=sides,
    d=dims,
    dtype=st.sampled_from(FLOATING),
    view=st.sampled_from(sorted(VIEWS)),
    causal=st.booleans(),
    scale=st.sampled_from([None, None, 1.0, 0.25, -0.5, 0.0]),
)
def test_it_agrees_with_torch(
    device: str,
    batch: tuple[int, ...],
    heads: tuple[int, int],
    m: int,
    n: int,
    d: int,
    dtype: torch.dtype,
    view: str,
    causal: bool,
    scale: float | None,
) -> None:
    q, k, v = drawn(batch, heads, m, n, d, dtype, device, view)
    actual = cuda_ops.attention(q, k, v, causal, scale)
    assert actual.dtype == dtype and actual.is_contiguous()
    # Large scores are less exact in float32 than weights need.
    terms = 1 + (dtype.itemsize > 2) * abs(scale or 0) * d / 8
    agrees(actual, torch_math(q, k, v, causal, scale), terms)


@on_each_device
@settings(max_examples=15, deadline=None)
@given(
    heads=grouped,
    m=st.integers(1, 40),
    n=st.integers(250, 3000),
    d=dims,
    dtype=st.sampled_from(FLOATING),
    view=st.sampled_from(sorted(VIEWS)),
)
def test_few_queries_see_many_keys(
    device: str,
    heads: tuple[int, int],
    m: int,
    n: int,
    d: int,
    dtype: torch.dtype,
    view: str,
) -> None:
    """Blocks share the keys."""
    q, k, v = drawn((), heads, m, n, d, dtype, device, view)
    actual = cuda_ops.attention(q, k, v)
    agrees(actual, torch_math(q, k, v))
    assert torch.equal(actual, cuda_ops.attention(q, k, v))


@on_each_device
@settings(max_examples=25, deadline=None)
@given(
    heads=grouped,
    m=sides,
    n=sides,
    d=dims,
    dtype=st.sampled_from(FLOATING),
    view=st.sampled_from(sorted(VIEWS)),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.25]),
)
def test_gradients_agree_with_torch(
    device: str,
    heads: tuple[int, int],
    m: int,
    n: int,
    d: int,
    dtype: torch.dtype,
    view: str,
    causal: bool,
    scale: float | None,
) -> None:
    q, k, v = drawn((1,), heads, m, n, d, dtype, device, view)
    gradients_agree(q, k, v, causal, scale)


@on_each_device
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_each_kernel_with_several_tiles(device: str, dtype: torch.dtype, d: int) -> None:
    """Several tiles of queries and of keys, with and without a rest."""
    sizes = [(256, 256), (300, 140)] if device == "cuda" else [(150, 140)]
    for m, n in sizes:
        for causal in (False, True):
            q, k, v = drawn((1,), (2, 1), m, n, d, dtype, device)
            agrees(cuda_ops.attention(q, k, v, causal), torch_math(q, k, v, causal))
            gradients_agree(q, k, v, causal)


@on_each_device
@pytest.mark.parametrize("causal", [False, True])
def test_few_queries_or_keys(device: str, causal: bool) -> None:
    for m, n in ((1, 1), (1, 150), (150, 1), (5, 100), (100, 5)):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = drawn((2,), (2, 2), m, n, 64, dtype, device)
            agrees(cuda_ops.attention(q, k, v, causal), torch_math(q, k, v, causal))
            gradients_agree(q, k, v, causal)


@on_each_device
def test_nothing_to_attend_to_gives_zeros(device: str) -> None:
    for m, n, batch in ((3, 0, 2), (0, 3, 2), (0, 0, 1), (3, 3, 0)):
        leaves = [
            x.requires_grad_() for x in drawn((batch,), (2, 2), m, n, 8, torch.float32, device)
        ]
        out = cuda_ops.attention(*leaves)
        assert out.shape == leaves[0].shape and not out.any()
        out.sum().backward()
        for leaf in leaves:
            assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@on_each_device
def test_gradcheck(device: str) -> None:
    for heads, m, n, causal in (((1, 1), 3, 4, False), ((2, 1), 4, 3, True), ((4, 2), 2, 5, True)):
        tensors = [x.requires_grad_() for x in drawn((1,), heads, m, n, 3, torch.float64, device)]
        assert torch.autograd.gradcheck(lambda *t, c=causal: cuda_ops.attention(*t, c), tensors)


@on_each_device
@pytest.mark.parametrize("dtype", FLOATING)
def test_large_scores_are_a_choice(device: str, dtype: torch.dtype) -> None:
    """Powers of the largest scores neither overflow nor lose the one that is chosen."""
    q, k, v = drawn((1,), (2, 2), 70, 90, 64, dtype, device)
    far = 200 if dtype is torch.float16 else 1e8
    out = cuda_ops.attention(far * q, far * k, v)
    agrees(out, torch_math(far * q, far * k, v))


@on_each_device
def test_a_nan_stays_in_its_row(device: str) -> None:
    q, k, v = drawn((1,), (1, 1), 70, 90, 64, torch.bfloat16, device)
    expected = cuda_ops.attention(q, k, v)
    q[0, 0, 5, 3] = math.nan
    actual = cuda_ops.attention(q, k, v)
    assert actual[0, 0, 5].isnan().all()
    kept = torch.arange(70, device=device) != 5
    assert torch.equal(actual[0, 0, kept], expected[0, 0, kept])


@on_each_device
def test_equal_calls_give_equal_bits(device: str) -> None:
    q, k, v = drawn((2,), (4, 2), 200, 170, 64, torch.bfloat16, device)
    grad = torch.ones_like(q)
    first, second = (gradients(cuda_ops.attention, (q, k, v), grad, True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@on_each_device
def test_heads_of_any_layout_and_broadcast(device: str) -> None:
    q, k, v = drawn((2, 3), (4, 4), 20, 30, 16, torch.float32, device)
    expected = torch_math(q, k[:1, :, :1], v[:1, :, :1].expand(2, 3, 4, 30, 16))
    agrees(cuda_ops.attention(q, k[:1, :, :1], v[:1, :, :1]), expected)
    q, k, v = (x.permute(1, 0, 2, 3, 4) for x in (q, k, v))
    agrees(cuda_ops.attention(q, k, v), torch_math(q, k, v))
    agrees(cuda_ops.attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), torch_math(q, k, v)[0, 0, 0])
    summed = gradients(cuda_ops.attention, (q, k[:1, :, :1], v[:1]), torch.ones_like(q))
    assert [g.shape for g in summed] == [q.shape, k[:1, :, :1].shape, v[:1].shape]


@on_each_device
def test_the_lse_is_hidden_and_right(device: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = drawn((1,), (2, 2), 40, 50, 64, dtype, device)
        out, lse = torch.ops.cuda_ops.attention(q, k, v, False, 0.5)
        assert torch.equal(out, cuda_ops.attention(q, k, v, scale=0.5))
        assert lse.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        expected = (q.cpu().double() @ k.cpu().double().mT * 0.5).logsumexp(-1)
        torch.testing.assert_close(lse.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@on_each_device
def test_transforms(device: str) -> None:
    q, k, v = drawn((3,), (4, 2), 20, 30, 16, torch.float32, device)
    expected = cuda_ops.attention(q, k, v, True)
    attend = torch.vmap(lambda a, b, c: cuda_ops.attention(a, b, c, True))
    torch.testing.assert_close(attend(q, k, v), expected)
    shared = torch.vmap(lambda a: cuda_ops.attention(a, k[0], v[0]))(q)
    torch.testing.assert_close(shared, cuda_ops.attention(q, k[:1], v[:1]))
    with torch.autocast(device, torch.bfloat16):
        assert cuda_ops.attention(q, k, v).dtype is torch.bfloat16


@on_each_device
def test_it_compiles(device: str) -> None:
    q, k, v = drawn((2,), (4, 2), 20, 30, 16, torch.float32, device)
    compiled = torch.compile(lambda *t: cuda_ops.attention(*t, True), fullgraph=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, expected = compiled(*leaves), cuda_ops.attention(*leaves, True)
    torch.testing.assert_close(out, expected)
    for one, other in zip(
        torch.autograd.grad(out.sum(), leaves),
        torch.autograd.grad(expected.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = drawn((1,), (4, 2), 5, 6, 8, torch.float32, "cpu")

    def refused(text: str, *args: Any) -> None:
        with pytest.raises(RuntimeError, match=text):
            cuda_ops.attention(*args)

    refused("argument 'k': expected a number of heads that divides the 4 of 'q'",
            q, *[torch.zeros(1, 3, 6, 8)] * 2)  # fmt: skip
    refused("expected dims '...' of ", q, k, v[:, :1].expand(1, 3, 6, 8))
    refused("argument 'k': expected dim 'd'", q, k[..., :4], v[..., :4])
    refused("argument 'v': expected dim 'n'", q, k, v[..., :4, :])
    refused("argument 'q': expected dim 'd' .* from 1 to 256", *[torch.zeros(1, 2, 3, 257)] * 3)
    refused("argument 'k': expected dtype float32", q, k.double(), v.double())
    lse = torch.zeros(1, 2, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="argument 'lse': expected dtype float32, got float64"):
        torch.ops.cuda_ops.attention_backward(q[:, :2], q[:, :2], k, v, q[:, :2], lse)
