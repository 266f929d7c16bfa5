"""rotary_embedding and rotary_embedding_ against torch: any shape, layout, dtype and pairing."""

from __future__ import annotations

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
    reload("rotary_embedding", "rotary_embedding_")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
on_each_device = pytest.mark.parametrize("device", DEVICES)
both_pairings = pytest.mark.parametrize("interleaved", [False, True])

#: Views of x (..., S, heads, D); each has at least three dims.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "part of a projection": lambda x: F.pad(x, (0, 0, 2, 3))[..., 2:-3, :],
    "part of a head": lambda x: F.pad(x, (8, 16))[..., 8:-16],
    "heads before tokens": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns": lambda x: x.mT.contiguous().mT,
    "an odd start": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
}


def exact(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """The pairs as complex numbers, times those of the angles."""
    pairs = cos.shape[-1]
    turned, rest = x.double()[..., : 2 * pairs], x.double()[..., 2 * pairs :]
    shape = (pairs, 2) if interleaved else (2, pairs)
    a, b = turned.unflatten(-1, shape).unbind(-1 if interleaved else -2)
    angle = torch.complex(cos.double(), sin.double()).unsqueeze(-2)
    product = torch.view_as_real(torch.complex(a, b) * angle)
    joined = (product if interleaved else product.transpose(-2, -1)).flatten(-2)
    return torch.cat((joined, rest.expand(*joined.shape[:-1], -1)), -1)


def tables_of(
    tokens: tuple[int, ...], pairs: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    angle = 9 * torch.rand(*tokens, pairs, generator=torch.Generator().manual_seed(pairs))
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def agrees(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of the result, and of two products that may cancel."""
    computed = torch.float64 if actual.dtype is torch.float64 else torch.float32
    rtol = torch.finfo(actual.dtype).eps
    atol = 4 * torch.finfo(computed).eps * max(1.0, expected.abs().max().item())
    if actual.dtype is torch.float16:
        atol += 2**-24  # half of its smallest number, and a little
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


dims = st.one_of(st.integers(0, 40), st.sampled_from([48, 64, 80, 96, 128, 256, 300]))
dtypes = st.sampled_from(FLOATING)
views = st.sampled_from(sorted(VIEWS))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    dim = draw(dims)
    most = dim // 2
    return {
        "loop": tuple(draw(st.lists(st.integers(0, 3), max_size=2))),
        "tokens": draw(st.integers(0, 5)),
        "heads": draw(st.integers(0, 5)),
        "dim": dim,
        "pairs": draw(st.sampled_from(sorted({0, most, most // 2, most // 16 * 8, most // 3}))),
        "own_tables": draw(st.booleans()),  # for each sequence
        "dtype": draw(dtypes),
        "table": draw(dtypes),
        "view": draw(views),
        "interleaved": draw(st.booleans()),
    }


def made(call: dict[str, Any], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = (call["tokens"],)
    shape = (*call["loop"], *tokens, call["heads"], call["dim"])
    x = VIEWS[call["view"]](random(shape, call["dtype"], device))
    loop = call["loop"] if call["own_tables"] else ()
    return x, *tables_of((*loop, *tokens), call["pairs"], call["table"], device)


@on_each_device
@settings(max_examples=200, deadline=None)
@given(call=calls())
def test_it_agrees_with_complex_numbers(device: str, call: dict[str, Any]) -> None:
    x, cos, sin = made(call, device)
    before = x.clone()
    actual = cuda_ops.rotary_embedding(x, cos, sin, call["interleaved"])
    assert actual.dtype == x.dtype and actual.shape == x.shape and actual.is_contiguous()
    assert torch.equal(x, before)
    if x.numel() > 0:
        agrees(actual, exact(x, cos, sin, call["interleaved"]))
    assert torch.equal(actual[..., 2 * call["pairs"] :], x[..., 2 * call["pairs"] :])


@on_each_device
@settings(max_examples=100, deadline=None)
@given(call=calls())
def test_in_place_gives_the_same_bits(device: str, call: dict[str, Any]) -> None:
    x, cos, sin = made(call, device)
    expected = cuda_ops.rotary_embedding(x, cos, sin, call["interleaved"])
    assert cuda_ops.rotary_embedding_(x, cos, sin, call["interleaved"]) is None
    assert torch.equal(x, expected)


@on_each_device
@settings(max_examples=60, deadline=None)
@given(call=calls())
def test_gradients_turn_back(device: str, call: dict[str, Any]) -> None:
    x, cos, sin = made(call, device)
    x = x.requires_grad_()
    out = cuda_ops.rotary_embedding(x, cos, sin, call["interleaved"])
    grad = random((*x.shape[:-1], x.shape[-1] + 1), x.dtype, device)[..., 1:]
    (actual,) = torch.autograd.grad(out, x, grad)
    assert actual.dtype == x.dtype and actual.shape == x.shape
    if x.numel() > 0:
        agrees(actual, exact(grad, cos, -sin, call["interleaved"]))


@both_pairings
@on_each_device
@settings(max_examples=40, deadline=None)
@given(pairs=st.integers(1, 70), rest=st.integers(0, 9), heads=st.integers(1, 5))
def test_angles_keep_lengths_and_add_up(
    device: str, interleaved: bool, pairs: int, rest: int, heads: int
) -> None:
    x = random((2, 3, heads, 2 * pairs + rest), torch.float64, device)
    first, second = (
        tables_of((3,), pairs, torch.float64, device),
        tables_of((2, 3), pairs, torch.float64, device),
    )
    out = cuda_ops.rotary_embedding(x, *first, interleaved)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    back = torch.ops.cuda_ops.rotary_embedding_backward(out, *first, interleaved)
    torch.testing.assert_close(back, x)
    both = torch.complex(*first) * torch.complex(*second)
    torch.testing.assert_close(
        cuda_ops.rotary_embedding(out, *second, interleaved),
        cuda_ops.rotary_embedding(x, both.real, both.imag, interleaved),
    )
    none = torch.ones(3, pairs, device=device), torch.zeros(3, pairs, device=device)
    assert torch.equal(cuda_ops.rotary_embedding(x, *none, interleaved), x)


@both_pairings
@on_each_device
def test_products_depend_on_distances_alone(device: str, interleaved: bool) -> None:
    position = torch.arange(40, device=device, dtype=torch.float64)
    angle = position[:, None] / 10000 ** (torch.arange(32, device=device) / 32)
    query, key = (
        random((1, 1, 64 + i), torch.float64, device)[..., :64].expand(40, 3, 64) for i in range(2)
    )
    q, k = (
        cuda_ops.rotary_embedding(t, angle.cos(), angle.sin(), interleaved) for t in (query, key)
    )
    scores = torch.einsum("shd,thd->hst", q, k)
    torch.testing.assert_close(scores[:, 1:, 1:], scores[:, :-1, :-1])


@both_pairings
@on_each_device
def test_loop_dims_broadcast(device: str, interleaved: bool) -> None:
    x = random((2, 1, 5, 3, 8), torch.float64, device).requires_grad_()
    cos, sin = tables_of((4, 5), 3, torch.float64, device)
    out = cuda_ops.rotary_embedding(x, cos, sin[:1], interleaved)
    expected = exact(x, cos, sin[:1].expand_as(cos), interleaved)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, x, grad), torch.autograd.grad(expected, x, grad)
    )
    with pytest.raises(RuntimeError, match=r"'x': expected dims '...' of \(..., s, h, d\) to be"):
        cuda_ops.rotary_embedding_(x.detach(), cos, sin, interleaved)


@both_pairings
@on_each_device
def test_gradcheck(device: str, interleaved: bool) -> None:
    x = random((2, 3, 2, 7), torch.float64, device).requires_grad_()
    cos, sin = tables_of((3,), 2, torch.float64, device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return cuda_ops.rotary_embedding(x, cos, sin, interleaved)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@on_each_device
def test_in_place_leaves_what_lies_around(device: str) -> None:
    qkv = random((2, 6, 5 + 2, 40), torch.bfloat16, device)
    before = qkv.clone()
    cos, sin = tables_of((6,), 16, torch.float32, device)
    view = qkv[:, :, 1:6]
    cuda_ops.rotary_embedding_(view, cos, sin)
    assert torch.equal(view, cuda_ops.rotary_embedding(before[:, :, 1:6], cos, sin))
    assert torch.equal(qkv[:, :, :1], before[:, :, :1])
    assert torch.equal(qkv[:, :, 6:], before[:, :, 6:])
    assert torch.equal(view[..., 32:], before[:, :, 1:6, 32:])


@both_pairings
@on_each_device
def test_nan_stays_in_its_pair_and_copies_keep_their_bits(device: str, interleaved: bool) -> None:
    x = torch.ones(2, 3, 24, dtype=torch.bfloat16, device=device)
    x[1, 2, 4] = float("nan")
    payload = torch.full((2, 3, 8), 0x7F91, dtype=torch.int16, device=device)
    x[..., 16:] = payload.view(torch.bfloat16)
    out = cuda_ops.rotary_embedding(x, *tables_of((2,), 8, torch.float32, device), interleaved)
    assert torch.equal(out[..., 16:].contiguous().view(torch.int16), payload)
    found = out[..., :16].isnan().nonzero().tolist()
    assert found == [[1, 2, 4], [1, 2, 5 if interleaved else 12]]


@on_each_device
def test_it_compiles(device: str) -> None:
    def layer(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = q * 2
        cuda_ops.rotary_embedding_(q, cos, sin)
        return q + cuda_ops.rotary_embedding(q, cos, sin, True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (4, 7):
        q = random((2, tokens, 3, 16), torch.float32, device)
        tables = tables_of((tokens,), 8, torch.float32, device)
        torch.testing.assert_close(compiled(q, *tables), layer(q, *tables))


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_tables_for_more_than_a_head(device: str) -> None:
    x, cos = torch.ones(2, 3, 7, device=device), torch.ones(2, 4, device=device)
    message = (
        r"argument 'cos': expected dim 'r' of \(..., s, r\) to be at most 3, as 2r is at most d, "
        r"got shape \[2, 4\]"
    )
    for call in (
        cuda_ops.rotary_embedding,
        cuda_ops.rotary_embedding_,
        torch.ops.cuda_ops.rotary_embedding_backward,
    ):
        with pytest.raises(RuntimeError, match=message):
            call(x, cos, cos)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_other_sizes_and_dtypes(device: str) -> None:
    x, cos = torch.ones(2, 3, 8, device=device), torch.ones(2, 4, device=device)
    for sin, message in (
        (cos[:, :3], "'sin': expected dim 'r' .* to be 4"),
        (cos[:1], "'sin': expected dim 's' .* to be 2"),
        (cos[0], r"'sin': expected at least 2 dims \(..., s, r\)"),
        (cos.int(), "'sin': expected dtype float64, float32, float16 or bfloat16, got int32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cuda_ops.rotary_embedding(x, cos, sin)


@on_each_device
def test_gradients_that_there_are_none_of(device: str) -> None:
    x, cos = torch.ones(2, 3, 8, device=device), torch.ones(2, 4, device=device)
    out = cuda_ops.rotary_embedding(x, cos.requires_grad_(), cos.detach())
    with pytest.raises(RuntimeError, match="rotary_embedding has no gradient for 'cos'"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="argument 'x': expected a tensor that requires no"):
        cuda_ops.rotary_embedding_(x.requires_grad_(), cos.detach(), cos.detach())


@on_each_device
def test_the_table_may_lie_in_x(device: str) -> None:
    x, sin = torch.randn(2, 2, 8, device=device), torch.rand(2, 4, device=device)
    expected = cuda_ops.rotary_embedding(x, x[:, 0, :4].clone(), sin)
    cuda_ops.rotary_embedding_(x, x[:, 0, :4], sin)
    torch.testing.assert_close(x, expected)


# --- on a GPU alone ------------------------------------------------------------------------------


@needs_gpu
@both_pairings
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    ("heads", "dim", "pairs"), [(40, 128, 64), (7, 80, 32), (1, 64, 32), (3, 96, 12), (2, 4100, 8)]
)
def test_many_tokens(
    heads: int, dim: int, pairs: int, dtype: torch.dtype, interleaved: bool
) -> None:
    x = random((3, 700, heads, dim), dtype, "cuda")
    for table in {dtype, torch.float32}:
        cos, sin = tables_of((700,), pairs, table, "cuda")
        agrees(cuda_ops.rotary_embedding(x, cos, sin, interleaved), exact(x, cos, sin, interleaved))


@needs_gpu
@pytest.mark.parametrize("dim", [256, 1])
def test_more_than_2_to_the_31_elements(dim: int) -> None:
    tokens, pairs = 1 << 12, dim // 2
    part = torch.randn(tokens, 256 // dim, dim, device="cuda", dtype=torch.bfloat16)
    x = part.expand(2049, *part.shape).contiguous()
    assert x.numel() > 2**31
    tables = tables_of((tokens,), pairs, torch.float32, "cuda")
    expected = cuda_ops.rotary_embedding(part, *tables)
    assert torch.equal(cuda_ops.rotary_embedding(x, *tables)[-1], expected)
    cuda_ops.rotary_embedding_(x, *tables)
    assert torch.equal(x[-1], expected)


@needs_gpu
def test_more_than_2_to_the_31_tokens() -> None:
    small = torch.randint(0, 1000, (2**31 + 5, 1, 1), device="cuda", dtype=torch.int16)
    x = small.view(torch.float16)
    table = torch.empty(2**31 + 5, 0, device="cuda", dtype=torch.float16)
    assert torch.equal(cuda_ops.rotary_embedding(x, table, table), x)


@needs_gpu
def test_in_a_cuda_graph() -> None:
    x = torch.randn(4, 300, 5, 64, device="cuda")
    cos, sin = tables_of((300,), 32, torch.bfloat16, "cuda")  # converted inside of the graph
    expected = cuda_ops.rotary_embedding(x, cos, sin)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuda_ops.rotary_embedding(x, cos, sin)
    graph.replay()
    assert torch.equal(captured, expected)
