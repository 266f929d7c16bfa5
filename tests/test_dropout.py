"""dropout: which elements it drops, its gradients, and when it draws."""

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
from torch.utils.checkpoint import checkpoint

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.testing.philox import random_uniform


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("dropout")


on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "part of longer rows": lambda x: F.pad(x, (3, 5))[..., 3:-5],
    "an odd start": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
    "an even start": lambda x: F.pad(x.flatten(), (4, 0))[4:].view(x.shape),
}


def expected(x: torch.Tensor, key: torch.Tensor, p: float) -> torch.Tensor:
    dropped = random_uniform(key.cpu(), x.shape) < p
    wide = x.cpu().double()
    return torch.where(dropped, 0.0, wide / (1 - p)) if p < 1 else torch.zeros_like(wide)


def agrees(actual: torch.Tensor, x: torch.Tensor, key: torch.Tensor, p: float) -> None:
    wanted, rounding = expected(x, key, p), torch.finfo(x.dtype).eps
    assert torch.equal(actual.cpu() == 0, wanted == 0)
    torch.testing.assert_close(actual.cpu().double(), wanted, rtol=2 * rounding, atol=0)


@on_each_device
@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 7, 8, 33]), min_size=2, max_size=3),
    dtype=st.sampled_from(FLOATING),
    view=st.sampled_from(sorted(VIEWS)),
    p=st.sampled_from([0.0, 2.0**-24, 0.1, 0.5, 0.9, 1.0]),
    key=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2),
)
def test_what_is_dropped(
    device: str, shape: list[int], dtype: torch.dtype, view: str, p: float, key: tuple[int, int]
) -> None:
    x = VIEWS[view]((torch.rand(shape) + 1).to(device, dtype))
    held = torch.tensor(key, device=device)
    agrees(cuda_ops.dropout(x, p, key=held), x, held, p)


@on_each_device
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("numel", [1, 4095, 70_000, (1 << 20) + 5])
def test_small_and_large_tensors(device: str, dtype: torch.dtype, numel: int) -> None:
    x, key = torch.ones(numel, dtype=dtype, device=device), torch.tensor([9, 8], device=device)
    agrees(cuda_ops.dropout(x, 0.25, key=key), x, key, 0.25)


@on_each_device
def test_the_layout_stays_and_the_mask_with_it(device: str) -> None:
    x = torch.rand(2, 8, 5, 6, device=device).contiguous(memory_format=torch.channels_last)
    key = torch.tensor([1, 2], device=device)
    out = cuda_ops.dropout(x, 0.5, key=key)
    assert out.stride() == x.stride()
    assert torch.equal(out, cuda_ops.dropout(x.contiguous(), 0.5, key=key))


@on_each_device
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_and_the_mean(device: str, p: float) -> None:
    n = 1 << 18
    out = cuda_ops.dropout(torch.ones(n, device=device), p).cpu()
    deviation = math.sqrt(p * (1 - p) / n)
    assert abs((out == 0).double().mean() - p) < 5 * deviation
    assert abs(out.double().mean() - 1) < 5 * deviation / (1 - p)


@on_each_device
def test_the_ends_of_p(device: str) -> None:
    x = torch.tensor([1.0, math.nan, math.inf, -0.0], device=device)
    assert torch.equal(cuda_ops.dropout(x, 1.0), torch.zeros_like(x))
    kept = cuda_ops.dropout(x, 0.0)
    torch.testing.assert_close(kept, x, rtol=0, atol=0, equal_nan=True)
    assert kept.data_ptr() != x.data_ptr()
    assert cuda_ops.dropout(x[:0]).shape == (0,)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf])
def test_another_p_is_refused(device: str, p: float) -> None:
    with pytest.raises(
        RuntimeError, match=f"::dropout: argument 'p': expected from 0 to 1, got {p:g}"
    ):
        cuda_ops.dropout(torch.ones(3, device=device), p)


def test_without_training_x_comes_back_and_nothing_is_drawn() -> None:
    x, state = torch.ones(3), torch.get_rng_state()
    assert cuda_ops.dropout(x, 0.5, False) is x
    assert cuda_ops.dropout(x, 0.5, training=False) is x
    assert torch.equal(torch.get_rng_state(), state)
    compiled = torch.compile(cuda_ops.dropout, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, 0.5, False), x)


@on_each_device
def test_gradients_of_any_order_have_the_mask(device: str) -> None:
    x = torch.rand(50, device=device, dtype=torch.float64, requires_grad=True)
    out = cuda_ops.dropout(x, 0.5)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.where(out == 0, 0.0, 2.0))
    key = torch.tensor([5, 6], device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return cuda_ops.dropout(x, 0.3, key=key) ** 2

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    (first,) = torch.autograd.grad((function(x) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    assert third.shape == x.shape


def test_nothing_but_the_key_is_kept_for_the_gradient() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.ones(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cuda_ops.dropout(x)
    assert [tensor.shape for tensor in kept] == [(2,)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = cuda_ops.dropout(F.relu(self.first(x)), 0.5, self.training)
        return self.second(cuda_ops.dropout(hidden, 0.1, self.training))


@on_each_device
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor, of products in float32
def test_a_model_trains_compiled_and_checkpointed(device: str, backend: str) -> None:
    model, x = Model().to(device), torch.randn(8, 16, device=device)

    def gradients(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        call(x).square().sum().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    plain = gradients(model)
    checkpointed = gradients(lambda x: checkpoint(model, x, use_reentrant=False))
    torch.testing.assert_close(checkpointed, plain)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    if backend == "aot_eager":  # Inductor has numbers of its own
        torch.testing.assert_close(gradients(compiled), plain)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    recomputing = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False), backend=backend, fullgraph=True
    )
    once, again = gradients(recomputing), gradients(recomputing)
    if device == "cpu":  # on a GPU a compiled checkpoint has a generator of its own, seeded once
        torch.testing.assert_close(once, again)
        if backend == "aot_eager":
            torch.testing.assert_close(once, plain)
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))


@on_each_device
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_checkpoint_drops_the_same_again(device: str, backend: str) -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return cuda_ops.dropout(x, 0.5) ** 2  # whose gradient needs what was dropped

    torch._dynamo.reset()
    recomputing = torch.compile(
        lambda x: checkpoint(square, x, use_reentrant=False), backend=backend, fullgraph=True
    )
    x = torch.ones(1000, device=device, requires_grad=True)
    outs = []
    for _ in range(2):
        outs.append(recomputing(x))
        (grad,) = torch.autograd.grad(outs[-1].sum(), x)
        assert torch.equal(grad, 2 * outs[-1])
    assert not torch.equal(*outs)


def test_vmap_asks_for_randomness() -> None:
    x = torch.ones(3, 200)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(cuda_ops.dropout)(x)
    same = torch.vmap(cuda_ops.dropout, randomness="same")(x)
    different = torch.vmap(cuda_ops.dropout, randomness="different")(x)
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    gradient = torch.func.grad(lambda x: (cuda_ops.dropout(x) ** 2).sum())
    for randomness, alike in (("same", True), ("different", False)):
        first, second, _ = torch.vmap(gradient, randomness=randomness)(x)
        assert torch.equal(first, second) is alike


@needs_gpu
def test_each_replay_of_a_graph_draws() -> None:
    x = torch.ones(1000, device="cuda")
    cuda_ops.dropout(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda_ops.dropout(x)
    drawn = []
    for seed in (None, None, 4, 4):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        torch.cuda.synchronize()
        drawn.append(out.clone())
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])


@needs_gpu
def test_both_devices_drop_the_same() -> None:
    x, key = torch.rand(100_003), torch.tensor([3, 4])
    ours = cuda_ops.dropout(x.cuda(), 0.3, key=key.cuda())
    torch.testing.assert_close(ours.cpu(), cuda_ops.dropout(x, 0.3, key=key))
