"""moe_send_ against torch's copies: any sizes, dtypes, layouts and number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_gpu

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.ops.moe_send_ import copied, foreach_copied
from cuda_ops.testing import PROFILES, check_op


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("moe_send_")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
on_each_device = pytest.mark.parametrize("device", DEVICES)

Lists = list[list[torch.Tensor]]


def drawn(
    tokens: int,
    hidden: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    of_weights: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[torch.Tensor]:
    torch.manual_seed(tokens + hidden)
    made = [
        torch.randn(tokens, hidden).to(dtype),
        torch.randint(64, (tokens, top_k)),
        torch.rand(tokens, top_k).to(of_weights),
    ]
    return [one.to(device) for one in made]


def places(read: list[torch.Tensor], ranks: int, start: int = 0) -> Lists:
    """Returns tensors to write, which begin so many elements into their memory."""
    return [
        [one.new_full((one.numel() + start,), 77)[start:].view(one.shape) for _ in range(ranks)]
        for one in read
    ]


def agree(read: list[torch.Tensor], firsts: list[int], found: Lists) -> None:
    wanted = places(read, len(firsts))
    copied(*read, firsts, *wanted)
    for one, other in zip(found, wanted, strict=True):
        assert all(map(torch.equal, one, other))


def test_the_checks_that_take_lists_pass() -> None:
    report = check_op("moe_send_", profile=PROFILES["quick"], isolate=False)
    assert report.passed, str(report)
    ran = {entry.check for entry in report.entries if entry.passed}
    assert ran >= {"reference", "numerics", "mutation", "registration", "public", "opcheck"}


@on_each_device
@pytest.mark.parametrize("ranks", [1, 2, 16])
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [
    (0, 64, 2), (1, 8, 1), (7, 33, 3), (64, 64, 8), (5, 0, 2), (5, 3, 0), (129, 2050, 8),
])  # fmt: skip
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_every_rank_gets_all(
    tokens: int, hidden: int, top_k: int, ranks: int, start: int, device: str
) -> None:
    firsts = [3 * rank - 5 for rank in range(ranks)]
    for dtype, of_weights in zip(FLOATING, [*FLOATING[1:], FLOATING[0]], strict=True):
        read = drawn(tokens, hidden, top_k, dtype, of_weights, device)
        found = places(read, ranks, start)
        assert cuda_ops.moe_send_(*read, firsts, *found) is None
        agree(read, firsts, found)


@on_each_device
def test_what_is_read_may_have_any_strides(device: str) -> None:
    read = drawn(6, 10, 4, torch.bfloat16, device=device)
    views = [read[0].mT.contiguous().mT, read[1][:1, :2].expand(6, 2), read[2][:, ::2]]
    found = places(views, 2)
    cuda_ops.moe_send_(*views, [0, 8], *found)
    agree(views, [0, 8], found)


@on_each_device
def test_nothing_beside_is_written(device: str) -> None:
    read = drawn(9, 13, 3, torch.float16, device=device)
    whole = [one.new_full((one.shape[0] + 2, one.shape[1]), 77) for one in read]
    cuda_ops.moe_send_(*read, [0], *[[one[1:-1]] for one in whole])
    for one in whole:
        assert bool((one[[0, -1]] == 77).all())
    agree(read, [0], [[one[1:-1]] for one in whole])


@on_each_device
def test_what_lies_where_it_is_written_is_read_first(device: str) -> None:
    read = drawn(4, 8, 2, device=device)
    found = places(read, 2)
    kept = [one.clone() for one in read]
    found[0][1], found[1][0] = read[0], read[1]
    cuda_ops.moe_send_(*read, [1, 2], *found)
    agree(kept, [1, 2], found)


@on_each_device
def test_the_peer_is_right(device: str) -> None:
    read = drawn(5, 6, 2, device=device)
    found = places(read, 3)
    foreach_copied(*read, [0, 1, 2], *found)
    agree(read, [0, 1, 2], found)


@pytest.mark.parametrize(("change", "message"), [
    ({"x": (4, 8, 1)}, r"'x': expected 2 dims, got shape \[4, 8, 1\]"),
    ({"x": torch.int64}, "'x': expected dtype float64, float32, float16 or bfloat16, got int64"),
    ({"experts": (4,)}, r"'experts': expected 2 dims, got shape \[4\]"),
    ({"experts": (5, 2)}, r"'experts': expected shape \[4, 2\], got shape \[5, 2\]"),
    ({"experts": torch.int32}, "'experts': expected dtype int64, got int32"),
    ({"weights": (4, 3)}, r"'weights': expected shape \[4, 2\], got shape \[4, 3\]"),
    ({"weights": torch.int64}, "'weights': expected dtype float64, .*, got int64"),
    ({"firsts": []}, "'firsts': expected 1 to 16 numbers, got 0"),
    ({"firsts": [0] * 17}, "'firsts': expected 1 to 16 numbers, got 17"),
    ({"firsts": [0]}, "'xs': expected as many tensors as 'firsts' has numbers, 1, got 2"),
    ({"chosen": []}, "'chosen': expected as many tensors as 'firsts' has numbers, 2, got 0"),
    ({"scales": []}, "'scales': expected as many tensors as 'firsts' has numbers, 2, got 0"),
    ({"xs": torch.float64}, r"'xs\[1\]': expected dtype float32 like 'x', got float64"),
    ({"chosen": torch.int32}, r"'chosen\[1\]': expected dtype int64 like 'experts', got int32"),
    ({"scales": torch.float16}, r"'scales\[1\]': expected dtype float32 like 'weights', got floa"),
    ({"xs": (3, 8)}, r"'xs\[1\]': expected shape \[4, 8\] like 'x', got shape \[3, 8\]"),
    ({"chosen": (8,)}, r"'chosen\[1\]': expected shape \[4, 2\] like 'experts', got shape \[8\]"),
    ({"scales": (4, 1)}, r"'scales\[1\]': expected shape \[4, 2\] like 'weights', got shape \[4"),
    ({"xs": "strided"}, r"'xs\[1\]': expected a contiguous tensor, got one that is not"),
    ({"chosen": "strided"}, r"'chosen\[1\]': expected a contiguous tensor, got one that is not"),
])  # fmt: skip
@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str, device: str) -> None:
    read = dict(zip(("x", "experts", "weights"), drawn(4, 8, 2, device=device), strict=True))
    lists = dict(zip(("xs", "chosen", "scales"), places([*read.values()], 2), strict=True))
    given: dict[str, Any] = {**read, "firsts": [0, 8], **lists}
    for name, changed in change.items():
        if name not in lists:
            given[name] = _changed(given[name], changed) if name in read else changed
        elif isinstance(changed, list):
            given[name] = changed
        else:  # the second of two
            lists[name][1] = _changed(lists[name][1], changed)
    with pytest.raises(RuntimeError, match=f"cuda_ops::moe_send_: argument {message}"):
        cuda_ops.moe_send_(**given)


def _changed(tensor: torch.Tensor, change: Any) -> torch.Tensor:
    if isinstance(change, torch.dtype):
        return tensor.to(change)
    return tensor.mT.contiguous().mT if change == "strided" else tensor.new_empty(change)


@on_each_device
def test_gradients_and_shared_memory_are_refused(device: str) -> None:
    read = drawn(4, 8, 2, device=device)
    found = places(read, 2)
    with pytest.raises(RuntimeError, match="'x': expected a tensor that requires no gradient"):
        cuda_ops.moe_send_(read[0].clone().requires_grad_(), *read[1:], [0, 8], *found)
    found[0][1] = found[0][0]
    with pytest.raises(RuntimeError, match="'xs': expected memory of its own"):
        cuda_ops.moe_send_(*read, [0, 8], *found)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    def sent(read: list[torch.Tensor], found: Lists) -> list[torch.Tensor]:
        cuda_ops.moe_send_(*read, [0, 8], *found)
        return [one + 1 for one in found[0]]

    compiled = torch.compile(sent, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (4, 7):
        read = drawn(tokens, 8, 2)
        found = places(read, 2)
        results = compiled(read, found)
        agree(read, [0, 8], found)
        assert all(torch.equal(one, read[0] + 1) for one in results)


# --- on a GPU alone ------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize(("tokens", "hidden"), [(700, 2048), (8192, 2048), (3001, 2049)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_many_tokens(tokens: int, hidden: int, ranks: int) -> None:
    read = drawn(tokens, hidden, 8, torch.bfloat16, device="cuda")
    for start in (0, 1):
        found = places(read, ranks, start)
        cuda_ops.moe_send_(*read, [*range(ranks)], *found)
        agree(read, [*range(ranks)], found)


@needs_gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.arange(16384, device="cuda").to(torch.bfloat16).expand(131_073, 16384).contiguous()
    experts, weights = (torch.ones(131_073, 1, device="cuda").to(d) for d in (torch.int64, x.dtype))
    found = places([x, experts, weights], 1)
    cuda_ops.moe_send_(x, experts, weights, [0], *found)
    assert torch.equal(found[0][0][-1], x[0]) and torch.equal(found[0][0][70_000], x[0])
    assert torch.equal(found[1][0], experts) and torch.equal(found[2][0], weights)


@needs_gpu
def test_in_a_cuda_graph() -> None:
    read = drawn(64, 2048, 8, torch.bfloat16, device="cuda")
    found = places(read, 8)
    firsts = [8 * rank for rank in range(8)]
    cuda_ops.moe_send_(*read, firsts, *found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_ops.moe_send_(*read, firsts, *found)
    read[0].normal_()
    read[1].add_(3)
    graph.replay()
    agree(read, firsts, found)
