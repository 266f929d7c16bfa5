"""What ranks write into each other's memory: threads as ranks, and a CPU's memory as that of GPUs.

``test_moe_ranks.py`` runs the same by processes, and on GPUs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import shared_boxes
import torch

import cuda_ops
from cuda_ops.distributed import symmetric
from cuda_ops.distributed.symmetric import Memory
from cuda_ops.ops._moe_senders import Gather


class Boxes:
    """The boxes of all ranks under one name, as torch's handle of one gives them."""

    def __init__(self, ranks: int) -> None:
        self.memory = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(ranks)]
        self._meeting = threading.Barrier(ranks, timeout=60)

    def get_buffer(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int
    ) -> torch.Tensor:
        return self.memory[rank].view(dtype)[offset:][: math.prod(shape)].view(*shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self._meeting.wait()


class Group:
    group_name = "threads"

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.size = lambda: rank, lambda: ranks


@pytest.fixture
def no_gpu() -> Iterator[None]:
    with shared_boxes.without_streams():
        yield


def on_ranks(ranks: int, work: Any) -> list[Any]:
    """Returns what ``work(memory)`` returns at each rank."""
    boxes = {name: Boxes(ranks) for name in ("gathered", "returned")}
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        memory = Memory(Group(rank, ranks), torch.device("cpu"), 60)
        for name, box in boxes.items():
            memory._boxes[name] = symmetric._Box(box.memory[rank], box)
        found[rank] = work(memory)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is not None for one in found)
    return found


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("own", [(3,), (4, 2), (3, 3), (0, 4, 2)])
def test_rows_arrive_by_rank(own: tuple[int, ...]) -> None:
    ranks, most, hidden = len(own), max(own), 5

    def work(memory: Memory) -> Any:
        for turn in range(3):
            rank = memory.rank
            x = torch.full((own[rank], hidden), rank + 10.0 * turn, dtype=torch.bfloat16)
            numbers = torch.full((most, 2), rank + turn)
            gathered = memory.begin_all_gather([numbers, x], most)()
            kept = [one.clone() for one in gathered]
            (back,) = memory.begin_all_to_all([kept[1] + 100 * rank])()
            back = back.clone()
            memory.begin_all_gather([x], most)()
            assert memory.begin_all_to_all([])() == []
        return kept, back

    for rank, ((numbers, x), back) in enumerate(on_ranks(ranks, work)):
        for k in range(ranks):
            assert (numbers[k * most : (k + 1) * most] == k + 2).all()
            assert (x[k * most :][: own[k]] == k + 20).all()
            assert (back[k * most :][: own[rank]] == 100 * k + rank + 20).all()


@pytest.mark.usefixtures("no_gpu")
def test_chunks_lie_beside_each_other() -> None:
    def work(memory: Memory) -> Any:
        rows = [torch.full((2, 4), 10.0 * chunk + memory.rank) for chunk in range(3)]
        coming = [
            memory.begin_all_gather([one], 2, chunk, aside=True) for chunk, one in enumerate(rows)
        ]
        going = [
            memory.begin_all_to_all([arrived()[0] + 100 * memory.rank], chunk, aside=True)
            for chunk, arrived in enumerate(coming)
        ]
        return [arrived()[0].clone() for arrived in going]

    for rank, chunks in enumerate(on_ranks(2, work)):
        for chunk, rows in enumerate(chunks):
            assert (rows[:2] == 10 * chunk + rank).all()
            assert (rows[2:] == 10 * chunk + rank + 100).all()


@pytest.mark.usefixtures("no_gpu")
def test_a_kernel_writes_to_places_itself() -> None:
    def work(memory: Memory) -> Any:
        there, here = memory.places(symmetric.GATHERED, [((6, 4), torch.float32)], 2)
        for rank, (place,) in enumerate(there):
            place.fill_(10 * memory.rank + rank)
        memory.begin_barrier(symmetric.GATHERED)()
        return here[0].clone()

    for rank, rows in enumerate(on_ranks(3, work)):
        assert rows.tolist() == [[10.0 * (row // 2) + rank] * 4 for row in range(6)]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "owned"), [((4, 2), (3, 2)), ((0, 3, 5), (1, 0, 4))])
def test_tokens_go_to_their_experts_and_back(
    tokens: tuple[int, ...], owned: tuple[int, ...], dtype: torch.dtype
) -> None:
    ranks, most, total = len(tokens), max(tokens), sum(owned)
    torch.manual_seed(0)
    x = torch.randn(ranks, most, 6).to(dtype)
    experts = torch.rand(ranks, most, total).argsort(-1)[..., :2]
    weights = torch.rand(ranks, most, 2)
    gate_up, down = torch.randn(total, 8, 6).to(dtype), torch.randn(total, 6, 4).to(dtype)
    firsts = [sum(owned[:rank]) for rank in range(ranks)]

    def work(memory: Memory) -> torch.Tensor:
        rank = memory.rank
        mine = slice(firsts[rank], firsts[rank] + max(1, owned[rank]))  # one that none chose
        ours = gate_up[mine], down[mine]
        if not owned[rank]:
            ours = torch.zeros(1, 8, 6, dtype=dtype), torch.zeros(1, 6, 4, dtype=dtype)

        def into(chosen: Any, rows: Any, scales: Any, outs: Any) -> None:
            there = torch.where(chosen < owned[rank], chosen, -1)
            cuda_ops.moe_experts_into_(rows, *ours, there, scales, outs)

        sent = Gather(memory, tokens, tokens[rank])
        parts = (one[rank, : tokens[rank]] for one in (experts, x, weights))
        return sent.products(lambda *_: None, into, *sent.tokens(firsts, rank, *parts)).clone()

    cuda_ops.moe_experts_into_, cuda_ops.moe_send_  # noqa: B018 - built before threads ask for them
    for rank, found in enumerate(on_ranks(ranks, work)):
        own = slice(0, tokens[rank])
        expected = cuda_ops.moe_experts(
            x[rank, own], gate_up, down, experts[rank, own], weights[rank, own]
        )
        torch.testing.assert_close(found, expected)


def test_boxes_have_room_or_not() -> None:
    memory = Memory.__new__(Memory)
    memory._boxes = {"gathered": symmetric._Box(torch.zeros(1024, dtype=torch.uint8), None)}
    assert memory.fits(gathered=1024)
    assert not memory.fits(gathered=1025)
    assert not memory.fits(gathered=1, returned=1)
    assert symmetric.room((3, 5), torch.float16) == 512
    assert symmetric.room((2, 129), torch.int64) == 2560
