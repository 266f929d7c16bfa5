"""Memory between fences: what is written beside allocations is found, and named by its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import needs_gpu

from cuda_ops.testing import allocations
from cuda_ops.testing.allocations import Allocation, Fences, bytes_at, fenced, recorded

FENCE, INNER = 0x2A, 0xFE


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A fence of 64 bytes, a piece of 512, and a fence, three times over, on a CPU."""
    memory = torch.full((3 * 640,), FENCE, dtype=torch.uint8)
    for k in range(3):
        memory[640 * k + 64 : 640 * k + 576] = INNER

    def at(address: int, size: int, device: object) -> torch.Tensor:
        start = address - memory.data_ptr()
        return memory[start : start + size]

    monkeypatch.setattr(allocations, "bytes_at", at)
    return memory


def fences_of(memory: torch.Tensor) -> Fences:
    parts = [memory[640 * k : 640 * (k + 1)] for k in range(3)]
    return Fences(
        FENCE, INNER, [half for part in parts for half in (part[:64], part[576:])],
        [Allocation(part[64:].data_ptr(), 512) for part in parts],
    )  # fmt: skip


def made(memory: torch.Tensor, *sizes: int) -> list[Allocation]:
    return [Allocation(memory[640 * k + 64 :].data_ptr(), n) for k, n in enumerate(sizes)]


def test_what_is_written_inside_is_no_matter(memory: torch.Tensor) -> None:
    memory[64:164] = 7
    assert fences_of(memory).written(made(memory, 100, 512, 12)) == ""


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (164, "0 bytes behind the 100"),
        (575, "411 bytes behind the 100"),
        (576, "412 bytes behind the 100"),
        (63, "1 bytes in front of the 100"),
        (640 + 576, "0 bytes behind the 512"),
        (640 + 60, "4 bytes in front of the 512"),
    ],
)
def test_what_is_written_beside_is_found(memory: torch.Tensor, place: int, text: str) -> None:
    memory[place] = 7
    assert fences_of(memory).written(made(memory, 100, 512, 12)) == text


def test_memory_given_out_twice_may_be_used_as_far_as_either_asked_for(
    memory: torch.Tensor,
) -> None:
    memory[64:264] = 7
    both = [Allocation(memory[64:].data_ptr(), size) for size in (200, 100)]
    assert fences_of(memory).written(both) == ""
    assert fences_of(memory).written(both[1:]) == "0 bytes behind the 100"


@pytest.mark.parametrize("sizes", [(12, 700, 4096), (5_000_000, 12, 1_048_577), (30_000_000,)])
@needs_gpu
def test_the_allocator_gives_out_what_is_between_fences(sizes: tuple[int, ...]) -> None:
    def call() -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]

    with fenced("cuda", sizes, FENCE, INNER) as fences:
        outputs, events = recorded("cuda", call)
    found = allocations.allocations(events)
    assert [one.size for one in found] == list(sizes)
    assert {one.address for one in found} == {one.address for one in fences.pieces}
    assert fences.written(found) == ""
    writes: dict[str, Callable[[Allocation], int]] = {
        "0 bytes behind": lambda one: one.end,
        "1 bytes in front of": lambda one: one.address - 1,
    }
    for text, place in writes.items():
        for one, output in zip(found, outputs, strict=True):
            if text.endswith("of") and not any(
                fence.data_ptr() + fence.numel() == one.address for fence in fences.fences
            ):
                continue  # a segment of its own, where nothing is in front
            byte = bytes_at(place(one), 1, "cuda")
            before = byte.item()
            byte.fill_(7)
            assert fences.written(found) == f"{text} the {output.numel()}"
            byte.fill_(before)
    assert fences.written(found) == ""
