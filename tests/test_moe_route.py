"""moe_route: which experts are chosen, and how much they count."""

from __future__ import annotations

import pytest
import torch
from conftest import needs_gpu

import cuda_ops
from cuda_ops.ops import _moe as references

pytestmark = pytest.mark.usefixtures("built_mixture")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


@on_each_device
def test_ties_go_to_the_lower_expert(device: str) -> None:
    logits = torch.tensor([[1.0, 2, 2, 1, 2], [0.0, -0.0, 0, 0, 0]], device=device)
    for scoring in references.SCORINGS:
        assert cuda_ops.moe_route(logits, 4, scoring)[1].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@on_each_device
def test_bias_chooses_and_does_not_weigh(device: str) -> None:
    logits = torch.randn(50, 8, device=device)
    bias = torch.zeros(8, device=device)
    bias[6] = 100
    for scoring in references.SCORINGS:
        plain, biased = (cuda_ops.moe_route(logits, 3, scoring, False, b) for b in (None, bias))
        assert (biased[1][:, 0] == 6).all()
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        torch.testing.assert_close(biased[0], scores.gather(1, biased[1]))
        torch.testing.assert_close(plain[0], scores.gather(1, plain[1]))


# Tokens, E and top_k. On a GPU a warp has one token, or several of many of them.
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 128, 8), (70, 61, 6), (600, 8, 2), (600, 5, 5), (600, 24, 8), (600, 24, 9),
        (601, 61, 6), (600, 64, 8), (2100, 100, 8), (2101, 128, 8), (2100, 200, 16), (2100, 256, 8),
        (2100, 300, 10), (40, 512, 16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["dense", "transposed", "from the second column"])
@on_each_device
@pytest.mark.quick(40)
def test_order_weights_and_gradient(
    sizes: tuple[int, int, int], dtype: torch.dtype, layout: str, device: str
) -> None:
    tokens, count, top_k = sizes
    torch.manual_seed(count)
    # Many are equal, and some of them are -0.
    values = (4 * torch.randn(tokens, count + 1)).round() / 4
    values[0, 1::3] = torch.nan
    logits = values.to(device, dtype)
    if layout == "transposed":
        logits = logits.t().contiguous().t()
    logits = logits[:, 1:] if layout == "from the second column" else logits[:, :-1]
    if layout == "dense":
        logits = logits.contiguous()

    exact = logits.double().detach().requires_grad_()
    keys = exact.detach().nan_to_num(nan=torch.inf)
    best = torch.sort(keys, dim=1, descending=True, stable=True).indices[:, :top_k]
    logits.requires_grad_()
    for scoring in references.SCORINGS:
        scores = exact.sigmoid() if scoring == "sigmoid" else exact.softmax(1)
        for renormalize in (True, False):
            wanted = scores.gather(1, best)
            if renormalize:
                wanted = wanted / wanted.sum(1, keepdim=True)
            weights, experts = cuda_ops.moe_route(logits, top_k, scoring, renormalize)
            assert torch.equal(experts, best)
            assert weights[0].isnan().all() == exact[0].isnan().any()
            torch.testing.assert_close(weights[1:].double(), wanted[1:], rtol=1e-5, atol=1e-7)
            share = torch.randn_like(wanted)
            (ours,) = torch.autograd.grad(weights, logits, share.to(weights.dtype))
            (theirs,) = torch.autograd.grad(wanted, exact, share, retain_graph=True)
            error = (ours[1:].double() - theirs[1:]).abs()
            rounding = 1e-5 if dtype in (torch.float64, torch.float32) else 1e-2
            assert (error <= rounding * theirs[1:].abs() + 1e-6).all()


def test_what_is_timed_has_no_ties() -> None:
    """Peers break ties by other rules, so their results would be rejected."""
    for seed in range(3):
        torch.manual_seed(seed)
        for count, top_k in ((8, 2), (512, 16)):
            logits = references.distinct_logits(4096, count, torch.device("cpu"))
            ours, theirs = references.route(logits, top_k), references.torch_route(logits, top_k)
            assert torch.equal(ours[1], theirs[1])
            assert not torch.equal(logits[0], logits[1])
