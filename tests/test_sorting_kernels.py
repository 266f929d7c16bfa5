"""Tests which kernels bitonic_sort chooses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import plan_program

from cuda_ops.testing.subject import find

#: 99 KB of shared memory.
L40S = "8.9,142,99"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Returns the plan as a function. ``wide``: how many clusters of 16 blocks run at once, which
    differs from chip to chip; None: no clusters, not even of 8 blocks.
    """
    answers = plan_program(tmp_path_factory, "sort_plan.cpp")

    def choose(rows: int, n: int, size: int, device: str = "H200", wide: int | None = None) -> str:
        (answer,) = answers([f"{device} {rows} {n} {size} {int(wide is not None)} {wide or 0}"])
        return answer

    return choose


@pytest.mark.slow
def test_the_sanitizer_is_shown_every_path(plan: Callable[..., str]) -> None:
    def path(rows: int, n: int, size: int) -> tuple[str, ...]:
        words = plan(rows, n, size, wide=7).split()
        return (words[0], words[4], words[6], str(size))  # with items and blocks of a cluster

    samples = find("bitonic_sort").kernel_samples
    shown = {path(*x.shape, x.dtype.itemsize) for sample in samples for x in sample.tensors}
    sizes = (1, 2, 4, 8)
    given = {
        path(rows, n, size)
        for rows in (1, 5, 9, 17, 70)
        for n in (1025, 3000, 9000, 16_500, 20_000, 33_000, 70_000, 140_000)
        for size in sizes
    }
    assert {how[:3] for how in given} == {how[:3] for how in shown}
    # The keys' width makes other kernels of radix sorts.
    assert {how for how in given if how[0] == "4"} <= shown


def test_the_plan_of_each_length(plan: Callable[..., str]) -> None:
    nothing, warp, block, cluster, radix = "01234"
    assert plan(0, 5, 4)[0] == plan(5, 0, 4)[0] == nothing
    assert plan(1000, 16, 4) == (
        f"{warp} width 16 items 0 cluster 0 threads 128 blocks 8 shared 0 at once 0, 0 bytes"
    )
    assert plan(1000, 1000, 4).startswith(f"{warp} width 1024 items 0 cluster 0 threads 128")
    assert plan(7, 1025, 4) == (
        f"{block} width 0 items 32 cluster 0 threads 64 blocks 7 shared 12416 at once 0, 0 bytes"
    )
    assert plan(7, 32768, 4).startswith(f"{block} width 0 items 64 cluster 0 threads 512 blocks 7")
    assert plan(7, 32769, 4).startswith(radix)
    # float64 and int64, and GPUs with less shared memory, go over to the radix sort earlier.
    assert plan(7, 22528, 8)[0] == block and plan(7, 22529, 8)[0] == radix
    assert plan(7, 16384, 4, L40S)[0] == block and plan(7, 16385, 4, L40S)[0] == radix
    # Few rows go to wide clusters, more of them to others, many to the radix sort.
    assert plan(7, 1 << 16, 4, wide=7) == (
        f"{cluster} width 0 items 8 cluster 16 threads 512 blocks 112 shared 0 at once 0, 0 bytes"
    )
    assert plan(8, 1 << 16, 4, wide=7) == (
        f"{cluster} width 0 items 16 cluster 8 threads 512 blocks 64 shared 0 at once 0, 0 bytes"
    )
    assert plan(64, 1 << 16, 4, wide=7)[0] == cluster and plan(65, 1 << 16, 4, wide=7)[0] == radix
    assert plan(7, 1 << 17, 4, wide=7)[0] == cluster and plan(7, 1 << 18, 4, wide=7)[0] == radix
    assert plan(1, 1 << 16, 4, wide=0).startswith(f"{cluster} width 0 items 16 cluster 8")
    # 8-byte dtypes to wide ones alone, and not the longest.
    assert plan(7, 1 << 16, 8, wide=7).startswith(f"{cluster} width 0 items 8 cluster 16")
    assert plan(8, 1 << 16, 8, wide=7)[0] == plan(7, 65537, 8, wide=7)[0] == radix
    # Rows that a block could sort too, if they are few.
    assert plan(7, 8193, 4, wide=7).startswith(f"{cluster} width 0 items 8 cluster 16 threads 256")
    assert plan(16, 8193, 4, wide=7).startswith(f"{cluster} width 0 items 16 cluster 8")
    assert plan(7, 8192, 4, wide=7)[0] == plan(17, 32768, 4, wide=7)[0] == block
    assert plan(8, 8193, 8, wide=7)[0] == block
    # 8-byte keys: sums of the digits, of each tile too, keys, indices, and facts about the keys.
    assert plan(2, 40_000, 8).endswith(
        f", {2 * 256 * 4 * (1 + 7) + 2 * 40_000 * 8 + 2 * 40_000 * 4 + 12} bytes"
    )
    # Few take one launch, many one for each step.
    separate = "by separate launches"
    assert separate in plan(1, 1 << 26, 8) and separate in plan(2048, 32768, 8)
    assert separate not in plan(1, (1 << 26) - 1, 8) and separate not in plan(1, 1 << 26, 4)
    # The workspace is bounded by 2^28 elements, or a single row.
    for size, most in [(1, 0.15), (2, 6.2), (4, 8.2), (8, 12.3)]:
        taken = int(plan(1 << 20, 1 << 16, size).split(", ")[1].split()[0])
        assert taken <= most * 2**28
