"""What holds for any mixture: other orders of tokens and of experts, equal ones, zeros, parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import ROUNDING, drawn

import cuda_ops

pytestmark = pytest.mark.usefixtures("built_mixture")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)

#: T, H, I, E and top_k by device: on a GPU such that every family of kernels runs.
SIZES: dict[str, Any] = {
    "cpu": st.tuples(
        st.integers(1, 20),
        st.integers(1, 6),
        st.integers(1, 4),
        st.integers(2, 6),
        st.integers(1, 2),
    ),
    "cuda": st.tuples(
        st.sampled_from([1, 3, 40, 300, 1100]),
        st.sampled_from([64, 136, 33]),
        st.sampled_from([64, 136, 17]),
        st.integers(2, 12),
        st.integers(1, 2),
    ),
}
DTYPES = {
    "cpu": st.just(torch.float64),
    "cuda": st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
}


def a_mixture(data: st.DataObject, device: str) -> list[Any]:
    """Tokens, logits, matrices and top_k; the logits as routers have them, with few equal ones."""
    sizes, dtype = data.draw(SIZES[device]), data.draw(DTYPES[device])
    x, logits, *matrices, top_k = drawn(sizes, data.draw(st.integers(0, 1000)))
    return [x.to(device, dtype), logits.to(device), *(m.to(device, dtype) for m in matrices), top_k]


properties = settings(max_examples=30, deadline=None, derandomize=True)


@on_each_device
@properties
@given(data=st.data())
def test_tokens_in_another_order(device: str, data: st.DataObject) -> None:
    x, logits, *rest = a_mixture(data, device)
    order = torch.randperm(len(x), device=device)
    assert torch.equal(
        cuda_ops.moe(x, logits, *rest)[order], cuda_ops.moe(x[order], logits[order], *rest)
    )


@on_each_device
@properties
@given(data=st.data())
def test_experts_by_another_number(device: str, data: st.DataObject) -> None:
    x, logits, gate_up, down, top_k = a_mixture(data, device)
    order = torch.randperm(len(down), device=device)
    out = cuda_ops.moe(x, logits[:, order], gate_up[order], down[order], top_k)
    torch.testing.assert_close(out, cuda_ops.moe(x, logits, gate_up, down, top_k))


@on_each_device
@properties
@given(data=st.data())
def test_equal_experts_are_one(device: str, data: st.DataObject) -> None:
    x, logits, gate_up, down, top_k = a_mixture(data, device)
    alike = gate_up[:1].expand_as(gate_up), down[:1].expand_as(down)
    one = cuda_ops.moe(x, logits[:, :1], gate_up[:1], down[:1], 1)
    # Other kernels may compute that: their sums run in another order.
    near = (
        {} if x.dtype is torch.float64 else {"rtol": ROUNDING[x.dtype], "atol": ROUNDING[x.dtype]}
    )
    torch.testing.assert_close(cuda_ops.moe(x, logits, *alike, top_k), one, **near)


@on_each_device
@properties
@given(data=st.data())
def test_agrees_with_its_parts(device: str, data: st.DataObject) -> None:
    x, logits, gate_up, down, top_k = a_mixture(data, device)
    chosen, experts = cuda_ops.moe_route(logits, top_k)
    whole = cuda_ops.moe(x, logits, gate_up, down, top_k)
    assert torch.equal(whole, cuda_ops.moe_experts(x, gate_up, down, experts, chosen))
    order, offsets = cuda_ops.moe_route_map(experts, len(down))
    assert torch.equal(
        experts.flatten()[order.long()].sort().values, experts.flatten()[order.long()]
    )
    for e in range(len(down)):
        mine = order[offsets[e] : offsets[e + 1]]
        assert torch.equal(mine.long(), torch.where(experts.flatten() == e)[0])


@on_each_device
@properties
@given(data=st.data())
def test_zero_weights_give_zeros(device: str, data: st.DataObject) -> None:
    x, logits, gate_up, down, top_k = a_mixture(data, device)
    chosen, experts = cuda_ops.moe_route(logits, top_k)
    assert not cuda_ops.moe_experts(x, gate_up, down, experts, 0 * chosen).any()
    assert not cuda_ops.moe(x, logits, gate_up, 0 * down, top_k).any()
