"""moe and its parts: values, imbalance, gradients, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from mixtures import ROUNDING, drawn, naive, weights

import cuda_ops
from cuda_ops.ops import _moe as references

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("built_mixture")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


# Tokens, H, I, E and top_k: one token, vectors that fit and none that does, tiles and a bit more.
@pytest.mark.parametrize(
    "sizes", [(1, 16, 8, 4, 2), (5, 7, 3, 3, 1), (70, 64, 40, 5, 4), (150, 33, 17, 64, 8)]
)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scoring", references.SCORINGS)
@pytest.mark.parametrize("renormalize", [True, False])
@on_each_device
def test_values_and_gradients(
    sizes: tuple[int, ...], dtype: torch.dtype, scoring: str, renormalize: bool, device: str
) -> None:
    tokens, hidden, inner, count, top_k = sizes
    torch.manual_seed(sum(sizes))
    x, logits = torch.randn(tokens, hidden), torch.randn(tokens, count)
    tensors = (x, logits, *weights(count, hidden, inner, torch.float32))
    inputs = [t.to(device, dtype).requires_grad_() for t in tensors]
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    options: dict[str, Any] = {"scoring": scoring, "renormalize": renormalize}
    out, exact = cuda_ops.moe(*inputs, top_k, **options), naive(*exact_inputs, top_k, **options)
    grad = torch.randn_like(exact)
    actual = [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
    expected = [exact, *torch.autograd.grad(exact, exact_inputs, grad)]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype is dtype and ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= ROUNDING[dtype] * theirs.norm() + 1e-14


@on_each_device
def test_imbalance(device: str) -> None:
    """All tokens to one expert, experts without tokens, none at all, nowhere."""
    gate_up, down = weights(6, 8, 4, device=device)
    for tokens in (0, 1, 200):
        x = torch.randn(tokens, 8, dtype=torch.float64, device=device, requires_grad=True)
        for expert in (0, 5, -1, 6):
            chosen = torch.full((tokens, 1), expert, device=device)
            ones = torch.ones(tokens, 1, dtype=torch.float64, device=device)
            mine = gate_up.requires_grad_(), down.requires_grad_()
            out = cuda_ops.moe_experts(x, *mine, chosen, ones)
            torch.testing.assert_close(out, references.mixture(x, *mine, chosen, ones))
            grads = torch.autograd.grad(out.sum(), mine)
            for e in range(6):
                touched = tokens > 0 and e == expert
                assert all(bool(grad[e].any()) == touched for grad in grads)


#: Assignments of experts: their rows are neighbors where products read them, 64 at a time.
TAILS = torch.tensor([1, 63, 0, 64, 65, 130, 127, 2])


def results_of_tails(mixture: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One expert for each token: the result, and gradients of x and both matrices."""
    x, grad, gate_up, down, chosen = tensors
    inputs = [t.detach().requires_grad_() for t in (x, gate_up, down)]
    out = mixture(*inputs, chosen, torch.ones_like(chosen, dtype=torch.float32))
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


@on_each_device
def test_tails_of_experts(device: str) -> None:
    torch.manual_seed(0)
    chosen = torch.arange(8).repeat_interleave(TAILS)[torch.randperm(int(TAILS.sum()))]
    chosen = chosen[:, None].to(device)
    x, grad = (torch.randn(len(chosen), 40, device=device).bfloat16() for _ in range(2))
    matrices = weights(8, 40, 24, torch.bfloat16, device)
    clean = results_of_tails(cuda_ops.moe_experts, x, grad, *matrices, chosen)
    doubles = (t.double() for t in (x, grad, *matrices))
    for ours, theirs in zip(
        clean, results_of_tails(references.mixture, *doubles, chosen), strict=True
    ):
        for one, other in zip(ours.double().split(1), theirs.split(1), strict=True):
            assert (one - other).norm() <= 2 * ROUNDING[torch.bfloat16] * other.norm()
    # NaN and infinities stay within their expert.
    for poison in (torch.nan, torch.inf):
        for spoilt in (torch.arange(8) % 2 == 0, torch.arange(8) % 2 == 1, torch.arange(8) == 4):
            experts = spoilt.to(device)
            tokens = experts[chosen[:, 0]]
            rows = (t.masked_fill(tokens[:, None], poison) for t in (x, grad))
            dirty = results_of_tails(cuda_ops.moe_experts, *rows, *matrices, chosen)
            used = experts & (TAILS > 0).to(device)
            for before, after, there in zip(
                clean, dirty, (tokens, tokens, used, used), strict=True
            ):
                assert torch.equal(before[~there], after[~there])
                assert not after[there].flatten(1).isfinite().all(1).any()


@on_each_device
def test_nan_stays_within_its_token(device: str) -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, device=device)
    logits[1, 3] = torch.nan
    for scoring in references.SCORINGS:
        for renormalize in (True, False):
            for bias in (None, torch.randn(5, device=device)):
                weights_, experts = cuda_ops.moe_route(logits, 2, scoring, renormalize, bias)
                # With a bias all of a softmax's scores are NaN, which ties.
                assert experts[1, 0] == (3 if bias is None or scoring == "sigmoid" else 0)
                assert ((experts >= 0) & (experts < 5)).all()
                assert weights_[1].isnan().all() and weights_[[0, 2]].isfinite().all()
    x, matrices = torch.randn(3, 4, dtype=torch.float64, device=device), weights(5, 4, 2)
    out = cuda_ops.moe(x, logits, *(m.to(device) for m in matrices), 2)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_bias_gets_no_gradient() -> None:
    x, logits, *rest = drawn((5, 4, 2, 3, 2), 0)
    bias = torch.nn.Parameter(torch.randn(3))
    for mixture in (cuda_ops.moe, torch.ops.cuda_ops.moe):
        loss = mixture(x, logits.requires_grad_(), *rest, expert_bias=bias).sum()
        grad, none = torch.autograd.grad(loss, (logits, bias), allow_unused=True)
        assert none is None
        transformed = torch.func.grad(lambda v: cuda_ops.moe(x, v, *rest, expert_bias=bias).sum())
        torch.testing.assert_close(transformed(logits), grad)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_errors_name_what_is_wrong(device: str) -> None:
    x, logits, gate_up, down, _ = (
        v.to(device) if isinstance(v, torch.Tensor) else v for v in drawn((4, 6, 2, 3, 1), 0)
    )
    floating = "dtype float64, float32, float16 or bfloat16"
    for arguments, text in (
        ((x, logits, gate_up, down, 4), "'top_k': expected at most 3, the size of dim 'e', got 4"),
        ((x, logits, gate_up, down, 0), "'top_k': expected from 1 to 16, got 0"),
        ((None, logits, gate_up, down, 2), "'x': expected a tensor, got None"),
        ((3.5, logits, gate_up, down, 2), "'x': expected a tensor, got float"),
        ((x, logits, None, down, 2), "'w_gate_up': expected a tensor, got None"),
        (
            (x[0, 0], logits, gate_up, down, 2),
            "'x': expected at least 1 dim (..., H), got shape []",
        ),
        ((x.int(), logits, gate_up, down, 2), f"'x': expected {floating}, got int32"),
        ((x, logits.int(), gate_up, down, 2), f"'router_logits': expected {floating}, got int32"),
        ((x, logits, gate_up[:2], down, 2), "'w_down': expected dim 'e' of [e, h, i] to be 2"),
        ((x, logits, gate_up[0], down, 2), "'w_gate_up': expected exactly the dims [e, 2i, h]"),
        ((x, logits, gate_up, down[0], 2), "'w_down': expected 3 dims (E, H, I), got shape [6, 2]"),
        (
            (x, logits, gate_up, down.float(), 2),
            "'w_down': expected dtype float64 like 'x', got float32",
        ),
        # What no part could see: logits of other tokens, and of missing experts.
        ((x[:3], logits, gate_up, down, 2), "'router_logits': expected shape (..., E) = [3, 3]"),
        (
            (x, logits, gate_up[:2], down[:2], 2),
            "'router_logits': expected shape (..., E) = [4, 2]",
        ),
        (
            (x.view(2, 2, 6), logits.view(1, 4, 3), gate_up, down, 2),
            "'router_logits': expected shape (..., E) = [2, 2, 3], got shape [1, 4, 3]",
        ),
        (
            (x, x.new_zeros(4, 600), x.new_zeros(600, 4, 6), x.new_zeros(600, 6, 2), 2),
            "'router_logits': expected dim 'e' of [t, e] to be from 1 to 512, got shape [4, 600]",
        ),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            cuda_ops.moe(*arguments)
    with pytest.raises(ValueError, match="'scoring': expected one of"):
        cuda_ops.moe(x, logits, gate_up, down, 1, scoring="tanh")


def test_errors_name_what_the_caller_gave() -> None:
    x, logits, *matrices, _ = drawn((4, 6, 2, 3, 1), 0)
    on = "'router_logits': expected a tensor on cpu like 'x', got one on meta"
    with pytest.raises(RuntimeError, match=on):
        cuda_ops.moe(x, logits.to("meta"), *matrices, 2)
    many = [torch.empty(2**30, n, device="meta") for n in (6, 3)]
    number = r"'top_k': expected fewer than 2\^31 choices .*, got 2 of each of 1073741824 tokens"
    with pytest.raises(RuntimeError, match=number):
        cuda_ops.moe(*many, *(m.to("meta", torch.float32) for m in matrices), 2)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_errors_of_the_parts(device: str) -> None:
    x, logits, gate_up, down, _ = (
        v.to(device) if isinstance(v, torch.Tensor) else v for v in drawn((4, 6, 2, 3, 1), 0)
    )
    chosen, ones = (x.new_ones(4, 2, dtype=dtype) for dtype in (torch.int64, torch.float64))
    kept, route_backward, backward, down_half, gate_up_half = (
        x.new_ones(4, 2, 4),
        torch.ops.cuda_ops.moe_route_backward,
        torch.ops.cuda_ops.moe_experts_backward,
        torch.ops.cuda_ops.moe_experts_backward_down,
        torch.ops.cuda_ops.moe_experts_backward_gate_up,
    )
    for function, arguments, text in (
        (cuda_ops.moe_route, (logits[0], 2), "'router_logits': expected exactly the dims [t, e]"),
        (cuda_ops.moe_route, (None, 2), "'router_logits': expected a tensor, got None"),
        (cuda_ops.moe_route, (logits, 2, 5), "'scoring': expected from 0 to 1, got 5"),
        (
            cuda_ops.moe_route,
            (logits, 2, 0, True, x[0]),
            "'expert_bias': expected dim 'e' of [e] to be 3, got shape [6]",
        ),
        (cuda_ops.moe_route_map, (chosen.int(), 3), "'experts': expected dtype int64, got int32"),
        (cuda_ops.moe_route_map, (chosen, 0), "'num_experts': expected from 1 to 512, got 0"),
        (
            cuda_ops.moe_experts,
            (x, gate_up, down, chosen.int(), ones),
            "'experts': expected dtype int64, got int32",
        ),
        (
            cuda_ops.moe_experts,
            (x, gate_up, down, chosen[:3], ones),
            "'experts': expected dim 't' of [t, k] to be 4, got shape [3, 2]",
        ),
        (
            cuda_ops.moe_experts,
            (x, gate_up, down, chosen, ones.int()),
            "'weights': expected dtype float64, float32, float16 or bfloat16, got int32",
        ),
        (
            backward,
            (x.float(), x, gate_up, down, chosen, ones, kept),
            "'x': expected dtype float32 like 'grad_out', got float64",
        ),
        (
            backward,
            (x, x, gate_up, down, chosen, ones, kept[0]),
            "'gate_up': expected exactly the dims [t, k, 2i], got shape [2, 4]",
        ),
        (
            backward,
            (x, x, gate_up, down, chosen, ones, kept, 16),
            "'wanted': expected from 0 to 15",
        ),
        (
            down_half,
            (x, down, chosen, ones, kept[:, :1]),
            "'gate_up': expected dim 'k' of [t, k, 2i] to be 2, got shape [4, 1, 4]",
        ),
        (
            down_half,
            (x, down[..., :1], chosen, ones, kept, 16),
            "'gate_up': expected dim '2i' of [t, k, 2i] to be 2, got shape [4, 2, 4]",
        ),
        (
            gate_up_half,
            (kept.flatten(0, 1), x, gate_up, chosen),
            "'grad_gate_up': expected exactly the dims [t, k, 2i], got shape [8, 4]",
        ),
        (
            gate_up_half,
            (kept, x, gate_up[:, :3], chosen),
            "'w_gate_up': expected dim '2i' of [e, 2i, h] to be 4, got shape [3, 3, 6]",
        ),
        (
            gate_up_half,
            (kept, x, gate_up, chosen, -1),
            "'wanted': expected from 0 to 15, got -1",
        ),
        (
            route_backward,
            (ones, logits, ones, chosen[0]),
            "'experts': expected exactly the dims [t, k], got shape [2]",
        ),
        (
            route_backward,
            (ones[:3], logits, ones, chosen),
            "'router_logits': expected dim 't' of [t, e] to be 3, got shape [4, 3]",
        ),
        (
            route_backward,
            (chosen, logits, ones, chosen),
            "'grad_weights': expected dtype float64, float32, float16 or bfloat16, got int64",
        ),
        (
            route_backward,
            (ones, logits, chosen, chosen),
            "'weights': expected dtype float64, float32, float16 or bfloat16, got int64",
        ),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            function(*arguments)


def test_the_composed_operator_says_why_a_part_refused() -> None:
    x, logits, gate_up, down, _ = drawn((4, 6, 2, 3, 1), 0)
    text = "cuda_ops::moe: torch failed to run cuda_ops::moe_route"
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # torch keeps it since then
        text += (
            ": RuntimeError: cuda_ops::moe_route: argument 'top_k': expected at most 3, the size "
        )
        text += "of dim 'e', got 9"
    else:
        text += "; torch 2.13 and later say why"
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        torch.ops.cuda_ops.moe(x, logits, gate_up, down, 9)


def test_no_elements_in_a_token() -> None:
    x, logits = torch.zeros(2, 3, 0), torch.randn(2, 3, 4)
    assert cuda_ops.moe(x, logits, torch.zeros(4, 6, 0), torch.zeros(4, 0, 3), 2).shape == x.shape
