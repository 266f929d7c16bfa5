"""rms_norm, layer_norm and add_rms_norm_ against torch, for any shape, layout, dtype and eps."""

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
    reload("rms_norm", "layer_norm", "add_rms_norm_")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
on_each_device = pytest.mark.parametrize("device", DEVICES)
both = pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "rows left out": lambda x: x.repeat_interleave(2, 0)[::2],
    "part of longer rows": lambda x: F.pad(x, (3, 5))[..., 3:-5],
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns": lambda x: x.mT.contiguous().mT,
    "an odd start": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
}


def exact(name: str, x: torch.Tensor, weights: list[torch.Tensor], eps: float) -> torch.Tensor:
    wide = [t.double() for t in weights]
    if name == "rms_norm":
        return F.rms_norm(x.double(), x.shape[-1:], *wide, eps)
    return F.layer_norm(x.double(), x.shape[-1:], *wide, eps)


def weights_of(name: str, n: int, dtype: torch.dtype, device: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = 1 if name == "rms_norm" else 2
    return [torch.randn(n, generator=generator).to(device, dtype) for _ in range(count)]


def agrees(actual: torch.Tensor, expected: torch.Tensor, terms: float = 1) -> None:
    """Within the rounding of the result, and of sums of terms of that size."""
    summed = torch.float64 if actual.dtype is torch.float64 else torch.float32
    rtol = torch.finfo(actual.dtype).eps + 32 * torch.finfo(summed).eps
    atol = 32 * torch.finfo(summed).eps * terms * max(1.0, expected.abs().max().item())
    if actual.dtype is torch.float16:
        atol += 2**-24  # half of its smallest number, and a little
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


lengths = st.one_of(
    st.integers(1, 40), st.sampled_from([64, 100, 127, 256, 513, 1000, 1024, 4096, 5000])
)
dtypes = st.sampled_from([(d, d) for d in FLOATING] + [(d, torch.float32) for d in FLOATING[2:]])


@both
@on_each_device
@settings(max_examples=60, deadline=None)
@given(
    loop=st.lists(st.integers(0, 5), max_size=3),
    n=lengths,
    dtype=dtypes,
    view=st.sampled_from(sorted(VIEWS)),
    scale=st.sampled_from([1.0, 1e-3, 100.0]),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
)
def test_it_agrees_with_torch(
    name: str, device: str, loop: list[int], n: int, dtype: Any, view: str, scale: float, eps: float
) -> None:
    shape = (*loop, n) if len(loop) > 0 or view in ("dense", "an odd start") else (2, n)
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(n))
    x = VIEWS[view](x.to(device, dtype[0]))
    weights = weights_of(name, n, dtype[1], device, n)
    actual = getattr(cuda_ops, name)(x, *weights, eps)
    assert actual.dtype == x.dtype and actual.shape == x.shape and actual.is_contiguous()
    if x.numel() > 0:
        agrees(actual, exact(name, x, weights, eps), terms=4)


@both
@on_each_device
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 70), n=lengths, dtype=dtypes, broadcast=st.booleans())
def test_gradients_agree_with_torch(
    name: str, device: str, rows: int, n: int, dtype: Any, broadcast: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, n, generator=generator).to(device, dtype[0]).requires_grad_()
    weights = [w.requires_grad_() for w in weights_of(name, n, dtype[1], device, n)]
    out = getattr(cuda_ops, name)(x, *weights, 1e-5)
    grad = torch.randn(1 if broadcast else rows, n, generator=generator).to(out).expand(rows, n)
    actual = torch.autograd.grad(out, (x, *weights), grad)
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    expected = torch.autograd.grad(exact(name, wide[0], wide[1:], 1e-5), wide, grad.double())
    for one, other, like in zip(actual, expected, (x, *weights), strict=True):
        assert one.dtype == like.dtype and one.shape == like.shape
        if one.numel() > 0:  # a short row without its mean may be next to 0, and is divided by that
            agrees(one, other, terms=8 + 64 * (n < 8))


@both
@on_each_device
def test_gradcheck(name: str, device: str) -> None:
    for shape in ((3, 5), (2, 2, 4), (7,)):
        x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        weights = [torch.randn_like(x.detach().flatten()[: shape[-1]]).requires_grad_()
                   for _ in range(1 if name == "rms_norm" else 2)]  # fmt: skip
        assert torch.autograd.gradcheck(getattr(cuda_ops, name), (x, *weights))


@pytest.mark.parametrize("n", [8, 40, 4096, 4099, 40_000, 70_000])
@both
@on_each_device
def test_rows_of_any_length(name: str, n: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, n, generator=torch.Generator().manual_seed(n)).to(device, dtype)
        weights = weights_of(name, n, dtype, device, 1)
        agrees(getattr(cuda_ops, name)(x, *weights, 1e-5), exact(name, x, weights, 1e-5), terms=4)
        tensors = [t.requires_grad_() for t in (x, *weights)]
        got = torch.autograd.grad(getattr(cuda_ops, name)(*tensors, 1e-5).sum(), tensors)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        expected = torch.autograd.grad(exact(name, wide[0], wide[1:], 1e-5).sum(), wide)
        for one, other in zip(got, expected, strict=True):
            agrees(one, other, terms=8)


@on_each_device
def test_no_rows_and_no_elements(device: str) -> None:
    for shape in ((0, 4), (3, 0), (2, 0, 3)):
        x = torch.randn(shape, device=device, requires_grad=True)
        weight, bias = (torch.ones(shape[-1], device=device, requires_grad=True) for _ in range(2))
        for out in (cuda_ops.rms_norm(x, weight), cuda_ops.layer_norm(x, weight, bias)):
            assert out.shape == x.shape
            out.sum().backward()
        assert weight.grad is not None and not weight.grad.any()
    with pytest.raises(RuntimeError, match="argument 'x': expected at least 1 dims"):
        cuda_ops.rms_norm(torch.tensor(1.0, device=device), torch.ones(1, device=device))


@on_each_device
def test_large_and_small_numbers(device: str) -> None:
    for dtype, scale in ((torch.float32, 1e15), (torch.float16, 2e4), (torch.bfloat16, 1e15)):
        x = (scale * torch.randn(4, 300).clamp(-3, 3)).to(device, dtype)
        weights = weights_of("layer_norm", 300, dtype, device, 0)
        agrees(cuda_ops.rms_norm(x, weights[0]), exact("rms_norm", x, weights[:1], 1e-6), 4)
        agrees(cuda_ops.layer_norm(x, *weights), exact("layer_norm", x, weights, 1e-5), 4)


@on_each_device
@pytest.mark.parametrize("n", [1, 7, 300, 5000])
@pytest.mark.parametrize("dtype", FLOATING)
def test_equal_numbers_leave_the_bias(dtype: torch.dtype, n: int, device: str) -> None:
    x = torch.tensor([[1.3], [-777.7], [0.0]], device=device).to(dtype).expand(3, n)
    weight, bias = weights_of("layer_norm", n, dtype, device, 0)
    actual = cuda_ops.layer_norm(x, weight, bias)
    torch.testing.assert_close(actual, bias.expand(3, n), rtol=1e-6, atol=1e-6)


@both
@on_each_device
def test_nan_stays_in_its_row(name: str, device: str) -> None:
    x = torch.ones(3, 100, device=device)
    x[1, 50] = float("nan")
    weights = weights_of(name, 100, torch.float32, device, 0)
    isnan = getattr(cuda_ops, name)(x, *weights).isnan()
    assert isnan[1].all() and not isnan[0].any() and not isnan[2].any()


@both
@on_each_device
def test_the_same_bits_every_time(name: str, device: str) -> None:
    x = torch.randn(3000, 1000, device=device, requires_grad=True)
    weights = [w.requires_grad_() for w in weights_of(name, 1000, torch.float32, device, 0)]
    grad = torch.randn(3000, 1000, device=device)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = getattr(cuda_ops, name)(x, *weights)
        return out, *torch.autograd.grad(out, (x, *weights), grad)

    first = gradients()
    for _ in range(3):
        assert all(map(torch.equal, first, gradients()))


# --- in place -----------------------------------------------------------------------------------


@on_each_device
@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(0, 9),
    n=lengths,
    dtype=dtypes,
    views=st.tuples(*[st.sampled_from(sorted(VIEWS))] * 2),
)
def test_add_rms_norm_writes_both(
    device: str, rows: int, n: int, dtype: Any, views: tuple[str, str]
) -> None:
    generator = torch.Generator().manual_seed(n)
    x, residual = (
        VIEWS[view](torch.randn(rows, n, generator=generator).to(device, dtype[0]))
        for view in views
    )
    (weight,) = weights_of("rms_norm", n, dtype[1], device, n)
    total = residual + x
    expected = exact("rms_norm", total, [weight], 1e-6)
    assert cuda_ops.add_rms_norm_(x, residual, weight) is None
    assert torch.equal(residual, total)
    if rows > 0:
        agrees(x, expected, terms=4)


@on_each_device
def test_add_rms_norm_writes_what_is_negated_lazily(device: str) -> None:
    lazy = [torch.randn(2, 3, dtype=torch.complex64, device=device).conj().imag for _ in range(2)]
    eager = [x.clone() for x in lazy]
    assert all(x.is_neg() for x in lazy)
    weight = torch.ones(3, device=device)
    for function in (cuda_ops.add_rms_norm_, torch.ops.cuda_ops.add_rms_norm_):
        function(*lazy, weight)
        function(*eager, weight)
        torch.testing.assert_close(lazy, eager)


@on_each_device
def test_add_rms_norm_leaves_what_lies_between(device: str) -> None:
    x, residual = torch.randn(4, 24, device=device), torch.randn(4, 24, device=device)
    before = x.clone(), residual.clone()
    cuda_ops.add_rms_norm_(x[:, 4:12], residual[:, 4:12], torch.ones(8, device=device))
    for now, then in zip((x, residual), before, strict=True):
        assert torch.equal(now[:, :4], then[:, :4]) and torch.equal(now[:, 12:], then[:, 12:])
        assert not torch.equal(now[:, 4:12], then[:, 4:12])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "weight", "message"), [
    (torch.float32, torch.bfloat16, "'weight': expected dtype float32 like 'x', got bfloat16"),
    (torch.float32, torch.float64, "'weight': expected dtype float32 like 'x', got float64"),
    (torch.float16, torch.bfloat16,
     "'weight': expected dtype float16 like 'x' or float32, got bfloat16"),
    (torch.float64, torch.float32, "'weight': expected dtype float64 like 'x', got float32"),
])  # fmt: skip
@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_other_dtypes_of_the_weight(
    x: torch.dtype, weight: torch.dtype, message: str, device: str
) -> None:
    def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    rows, weights = made(x, 2, 4), made(weight, 4)
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.rms_norm(rows, weights)
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.layer_norm(rows, weights, weights)
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.add_rms_norm_(rows, made(x, 2, 4), weights)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_a_bias_has_the_dtype_of_the_weight(device: str) -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16, device=device)
    message = "'bias': expected dtype bfloat16 like 'weight', got float32"
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.layer_norm(x, x[0], x[0].float())


# --- on a GPU alone ------------------------------------------------------------------------------


@needs_gpu
def test_in_a_cuda_graph() -> None:
    x = torch.randn(300, 1000, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(1000, device="cuda", requires_grad=True) for _ in range(2))

    def step() -> tuple[torch.Tensor, ...]:
        out = cuda_ops.layer_norm(x, weight, bias) + cuda_ops.rms_norm(x, weight)
        return torch.autograd.grad(out.sum(), (x, weight, bias))

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(map(torch.equal, captured, expected))


@needs_gpu
def test_more_than_2_to_the_31_elements() -> None:
    part = torch.randn(1 << 12, 256, device="cuda", dtype=torch.bfloat16)
    x = part.repeat(2049, 1)
    assert x.numel() > 2**31
    weight = torch.randn(256, device="cuda", dtype=torch.bfloat16)
    expected = cuda_ops.rms_norm(part, weight)
    assert torch.equal(cuda_ops.rms_norm(x, weight)[-4096:], expected)
    grad_x, _ = torch.ops.cuda_ops.rms_norm_backward(x, x, weight)
    of_part, _ = torch.ops.cuda_ops.rms_norm_backward(part, part, weight)
    assert torch.equal(grad_x[-4096:], of_part)
