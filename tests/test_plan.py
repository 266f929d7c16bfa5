"""The plans of four GPUs, by benchmarks/tuning/plan.cpp: none of them has to be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from conftest import plan_program

DEVICES = ("A100", "H100", "H200", "B200")
HOPPER = ("H100", "H200")

#: What is asked, and the answers of an A100, of an H100 and an H200, which have as many SMs and as
#: much shared memory, and of a B200.
PLANS = {
    # Hopper's kernel runs on 9.0 alone; others have mma.sync.
    "linear 4096 4096 4096": ("mma 128", "hopper 128x256 splits 1 pairs grid 132", "mma 128"),
    "matmul 512 10240 8192": ("mma 128", "hopper 128x128 B^T splits 1 pairs grid 132", "mma 128"),
    "linear 20 4096 4096": (
        "stream 32 splits 4", "hopper swapped 128x64 splits 3 grid 96", "stream 32 splits 8"
    ),
    "matmul 4096 4096 4096 float32 tf32x3": (
        "mma 128", "pack a b, hopper 128x128 splits 1 pairs grid 132", "mma 128"
    ),
    # 120 large tiles occupy 108 SMs and leave some of 148 idle.
    "matmul 1536 1280 4096": (
        "mma 128", "hopper 128x128 B^T splits 1 pairs grid 120", "mma 64"
    ),
    # 256 blocks: those of an A100 run in one go, of more SMs some would have one more than others.
    "linear 1 4096 14336": ("stream 8 splits 8", "stream 8 splits 4", "stream 8 splits 4"),
    "matmul 4096 4096 4096 float32": (
        "fma 128x128 quads of b", "fma 256x128 quads of b", "fma 128x128 quads of b"
    ),
    "matmul 4096 4096 4096 float64": ("simt 64", "simt 64", "simt 64"),
    # As many warps share a K as fill the SMs.
    "moe 1 8 2048 768 128": (
        "stream 8 splits 8 token no map, backward mma",
        "stream 8 splits 4 token no map, backward mma",
        "stream 8 splits 8 token no map, backward mma",
    ),
    "moe 64 8 2048 768 128": (
        "stream 8 splits 2 1, backward mma",
        "stream 8 splits 2 2, backward mma",
        "stream 8 splits 2 2, backward mma",
    ),
    "moe 4096 8 2048 768 128": (
        "mma, backward mma", "hopper, backward hopper", "mma, backward mma"
    ),
    # 163 KB hold fewer 8-byte keys of a row than 227; clusters are Hopper's.
    "sort 7 20480 int64": ("radix grid 28", "cluster of 16 grid 112", "block grid 7"),
    "sort 100 20000 float32": ("block grid 100", "block grid 100", "block grid 100"),
    "sort 100 40000 float32": ("radix grid 500", "cluster of 8 grid 800", "radix grid 500"),
    # As many chunks and splits as fill the SMs.
    "topk 64 131072 50": ("kept 64 chunks 54", "kept 64 chunks 66", "kept 64 chunks 74"),
    "topk 64 200 8": ("warp sort", "warp sort", "warp sort"),
    "topk 64 131072 2048": ("select chunks 1", "select chunks 2", "select chunks 2"),
    "topk 64 5000 4000": ("bitonic_sort", "bitonic_sort", "bitonic_sort"),
    "sum 32 2097152 float32": (
        "lanes 256 splits 27 grid 864",
        "lanes 256 splits 32 grid 1024",
        "lanes 256 splits 37 grid 1184",
    ),
    # Blocks of one warp: as many as fit by their shared memory.
    "attention 64 4 4096 128": (
        "few splits 6 of 704", "few splits 11 of 384", "few splits 13 of 320"
    ),
    "attention 8 512 32768 64": (
        "mma splits 6 of 5504", "hopper splits 4 of 8192", "mma splits 9 of 3648"
    ),
    "attention 32 4096 4096 128": (
        "mma splits 1 of 4096", "hopper splits 1 of 4096", "mma splits 1 of 4096"
    ),
}  # fmt: skip

Answers = Callable[[Iterable[str]], list[str]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return plan_program(tmp_path_factory, "../benchmarks/tuning/plan.cpp")


@pytest.mark.parametrize("question", PLANS)
def test_the_plans_of_each_device(plan: Answers, question: str) -> None:
    a100, hopper, b200 = PLANS[question]
    expected = {"A100": a100, **dict.fromkeys(HOPPER, hopper), "B200": b200}
    actual = plan(f"{device} {question}" for device in DEVICES)
    assert dict(zip(DEVICES, actual, strict=True)) == expected


def test_a_device_is_its_name_or_its_numbers(plan: Answers) -> None:
    question = "linear 1536 1280 4096"
    assert plan([f"8.0,108,163 {question}"]) == plan([f"A100 {question}"]) == ["mma 128"]
    assert plan([f"8.0,148,163 {question}"]) == ["mma 64"]
    assert plan([f"7.5,40,64 {question}"]) == ["simt 64"]


def test_what_is_not_a_question(plan: Answers) -> None:
    assert plan(["K80 matmul 1 1 1", "8.0,0,163 matmul 1 1 1"]) == [
        "no such device: K80", "no such device: 8.0,0,163"
    ]  # fmt: skip
    assert plan(["H200 matmul 1 1 1 int3"]) == ["no such dtype: int3"]
    assert plan(["H200 matmul 1 1"])[0].startswith("expected matmul M N K, linear")
