"""Tests which kernels matmul chooses, and each of them on a GPU."""

from __future__ import annotations

import itertools
import random
import re
import threading
from dataclasses import replace

import pytest
import torch
from conftest import needs_gpu
from gemm_cases import (
    A100,
    H200,
    LAYOUTS,
    T4,
    Case,
    Plans,
    anything,
    families,
    kernels,
    kinds,
    planner,
    smallest,
)

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.ops.matmul import PRECISIONS
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import find


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("matmul")


#: Sizes that are not multiples of anything, and cases that are not for Hopper's kernels.
BORDERS = [
    *(Case(m, n, 1032, layouts) for m in (3, 9, 24, 50, 100, 130, 260, 520, 1030)
      for n in (8, 40, 136, 1032, 4104) for layouts in LAYOUTS),
    *(Case(m, n, 1032, dtype=torch.float16) for m in (5, 130, 700) for n in (16, 80, 1000)),
    *(Case(m, n, k) for m in (77, 4104) for n in (3, 10, 25, 63) for k in (8, 136, 4104)),
    *(Case(m, n, 300, layouts, torch.float32, precision)
      for m, n in ((1, 64), (8, 100), (70, 90), (100, 1400), (1300, 1500), (2000, 36))
      for layouts in LAYOUTS for precision in ("ieee", "tf32", "tf32x3")),
    *(Case(m, n, k, layouts, aligned=False)
      for m, n, k in ((3, 5, 7), (64, 65, 127), (1537, 1411, 333)) for layouts in LAYOUTS),
    Case(70, 1031, 64), Case(300, 2001, 520), Case(64, 48, 96, batch=5),
    Case(9, 777, 264, batch=4), Case(333, 30, 2056, batch=3),
    Case(70, 96, 80, "ll", batch=3), Case(1, 777, 256, batch=4), Case(777, 2, 256),
    Case(65, 33, 17, dtype=torch.float64), Case(65, 33, 0), Case(0, 33, 8), Case(1, 1, 1),
    Case(65, 33, 0, dtype=torch.float32),
]  # fmt: skip
#: Large enough for copies of what the Hopper kernel cannot read.
PACKED = [
    *(Case(1000, 1500, 2100, layouts, torch.float32, "tf32") for layouts in ("kl", "lk", "ll")),
    *(Case(m, n, 2100, layouts, torch.float32, "tf32x3")
      for m, n in ((1000, 1500), (120, 4100)) for layouts in LAYOUTS),
    *(Case(1025, 1100, 2049, layouts, aligned=aligned)
      for layouts in LAYOUTS for aligned in (False, True)),
    Case(1025, 1100, 2049, dtype=torch.float16), Case(16, 9001, 4095),
    Case(520, 300, 1001, batch=9), Case(520, 300, 1001, "lk", torch.float32, "tf32x3", batch=9),
]  # fmt: skip


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    return planner(tmp_path_factory)


def test_the_choice(plans: Plans) -> None:
    assert plans([Case(4096, 4096, 4096)])[0].startswith("hopper 128x256")
    few = [Case(1, 4096, 4096), Case(4096, 1, 4096), Case(8, 4096, 520), Case(3, 4096, 64)]
    # 256 blocks of 8 splits run at once on 108 SMs, but not as many on each of 132.
    for device, splits in ((A100, 8), (H200, 4)):
        assert plans(few, device) == [
            f"stream 8 splits {splits}", f"stream swapped 8 splits {splits}",
            "stream 8 splits 4", "stream 8 splits 1",
        ]  # fmt: skip
    assert plans(few[:1], device=T4) == ["simt 64"]
    # Blocks of 8 splits: 256, which are no whole number for each SM, 384, nearly all that run at
    # once, and 512.
    waves = [Case(1, 4096, 14336), Case(1, 6144, 4096), Case(1, 8192, 8192)]
    assert plans(waves) == ["stream 8 splits 4", "stream 8 splits 8", "stream 8 splits 8"]
    more = [Case(9, 4096, 4096), Case(4096, 32, 4096), Case(33, 4096, 4096)]
    assert all(plan.startswith("hopper swapped 128x") for plan in plans([more[0], more[2]]))
    assert plans(more, device=A100) == [
        "stream 16 splits 4", "stream swapped 32 splits 4", "mma 64"
    ]  # fmt: skip
    vectors = [Case(m, n, 4096, dtype=torch.float32) for m, n in ((1, 4096), (4096, 2))]
    assert plans(vectors) == ["gemv", "gemv swapped"]
    assert plans([Case(16, 4096, 4096, "kl")])[0].startswith("hopper swapped 128x16")
    # 80 narrow tiles leave SMs idle, 224 are one or two for each.
    assert plans([Case(64, 10240, 8192), Case(64, 28672, 4096), Case(64, 5120, 5120)]) == [
        "hopper 128x160 splits 2 grid 128", "hopper 128x224 splits 1 grid 128",
        "hopper swapped 128x64 splits 3 grid 120",
    ]  # fmt: skip
    assert plans([Case(16, 4096, 4096, aligned=False)], device=A100) == ["mma 64"]
    # 1.94 and 3.88 waves of 132 SMs; tiles of 256 columns would make 1.21 and 3.39.
    assert plans([Case(512, 10240, 8192)]) == ["hopper 128x160 splits 1 pairs grid 132"]
    # Power limits what takes this long: wide tiles, though waves are emptier.
    assert plans([Case(4096, 28672, 8192)]) == ["hopper 128x256 splits 1 pairs grid 132"]
    assert plans([Case(1024, 14336, 4096)]) == ["hopper 128x224 splits 1 pairs grid 132"]
    # A pair below four rows of tiles would compute the fifth twice.
    assert plans([Case(640, 10240, 4096)]) == ["hopper 128x224 splits 1 grid 132"]
    assert plans([Case(128, 4096, 4096)]) == ["hopper 128x128 splits 3 grid 96"]
    unaligned = plans([Case(4096, 4096, 4096, aligned=False)])[0]
    assert unaligned.startswith("pack a b, hopper 128x256 splits")
    assert plans([Case(64, 64, 64, aligned=False)]) == ["mma 64"]
    assert plans([Case(3000, 3000, 8, aligned=False)]) == ["mma 128"]
    assert plans([Case(4096, 4096, 4096)], device=A100) == ["mma 128"]
    assert plans([Case(4096, 4096, 4096)], device=T4) == ["simt 64"]
    float32 = [Case(size, size, size, dtype=torch.float32) for size in (4096, 1024, 512)]
    assert plans(float32) == ["fma 256x128", "fma 128x64", "fma 32x64"]
    assert plans(float32, device=A100) == ["fma 128x128", "fma 64x64", "fma 64x64"]
    layouts = [Case(4096, 4096, 4096, order, torch.float32) for order in ("kl", "lk", "ll")]
    assert [plan[12:] for plan in plans(layouts)] == ["quads of b", "quads of a", "quads of a b"]
    assert plans([Case(4096, 4096, 4096, "ll", torch.float32, aligned=False)]) == ["fma 256x128"]
    assert plans(float32, device=T4) == ["simt 64"] * 3
    for precision, layouts, expected in (
        ("tf32", "kk", "hopper 128x256"),
        ("tf32", "kl", "pack b, hopper 128x256"),
        ("tf32", "lk", "pack a, hopper 128x256"),
        ("tf32x3", "kk", "pack a b, hopper 128x128"),
    ):
        case = Case(4096, 4096, 4096, layouts, torch.float32, precision)
        assert plans([case])[0].startswith(expected)
        assert plans([case], device=A100) == ["mma 128"]
    assert plans([Case(2000, 2000, 8, dtype=torch.float32, precision="tf32x3")]) == ["fma 128x128"]
    assert plans([Case(4096, 4096, 4096, dtype=torch.float64)]) == ["simt 64"]
    assert plans([Case(0, 8, 8), Case(8, 8, 0)]) == ["nothing", "simt 64"]
    # The streaming kernel's ints would not hold the blocks; the Hopper kernel's would hold neither
    # tiles plus the grid nor K of both parts.
    assert plans([Case(3, 3, 8, batch=2**31)]) == ["mma 128"]
    assert plans([Case(65, 65, 8, batch=2**30)]) == ["mma 128"]
    assert plans([Case(8, 8, 2**30, dtype=torch.float32, precision="tf32x3")]) == ["fma 32x32"]


@pytest.mark.parametrize("device", [T4, A100, H200])
def test_rows_that_go_on_across_a_batch_are_one_product(plans: Plans, device: str) -> None:
    n = k = 4096
    for case, folded in (
        # Whole sequences; the last token of each, whatever its row stride; one row for all.
        (Case(16, n, k, batch=64, walk=(k, 16 * k)), Case(1024, n, k)),
        (Case(1, n, k, batch=64, walk=(k, 128 * k)), Case(64, n, k, walk=(128 * k, 0))),
        (Case(1, n, k, batch=64, walk=(3, 128 * k)), Case(64, n, k, walk=(128 * k, 0))),
        (Case(1, n, k, batch=64, walk=(k, 0)), Case(64, n, k, walk=(0, 0))),
    ):
        assert plans([case], device) == plans([folded], device), case


def test_rows_that_do_not_go_on_are_copied_where_that_pays(plans: Plans) -> None:
    n = k = 4096
    few, many = Case(16, n, k, batch=64, walk=(64 * k, k)), Case(2047, n, k, walk=(k, 2048 * k))
    assert plans([few])[0] == "pack a, " + plans([Case(1024, n, k)])[0]
    # Each has tiles enough of its own.
    assert "pack" not in plans([replace(many, batch=8)])[0]


def test_copies_are_chosen_where_they_pay(plans: Plans) -> None:
    for case, plan in zip(PACKED, plans(PACKED), strict=True):
        assert plan.startswith("pack"), f"{case}: {plan}"
    assert not any("pack" in plan for plan in plans(PACKED, device=A100))


@pytest.fixture(scope="module")
def cases_of_kernels(plans: Plans) -> dict[str, Case]:
    return smallest(plans)


@pytest.mark.slow
def test_every_tile_and_layout_is_chosen_somewhere(cases_of_kernels: dict[str, Case]) -> None:
    for tile, layout in itertools.product(
        ("128x16", "128x32", "128x64", "128x128", "128x192", "128x256"),
        ("", " A^T", " B^T", " A^T B^T"),
    ):
        pattern = re.compile(rf"hopper (swapped )?{tile}{re.escape(layout)} splits")
        assert any(pattern.match(kernel) for kernel in cases_of_kernels), tile + layout
    for layout in ("", " A^T", " B^T", " A^T B^T"):
        pattern = re.compile(rf"hopper 128x\d+{re.escape(layout)} splits 1 pairs,")
        assert any(pattern.match(kernel) for kernel in cases_of_kernels), layout
    expected = [
        *(f"hopper 128x{tile} splits 1{pairs}" for tile in (160, 224) for pairs in ("", " pairs")),
        *(f"hopper 128x128 splits {splits}" for splits in (1, 2, 3)),
        *(f"stream {swap}8 splits {n}" for n in (1, 2, 4, 8) for swap in ("", "swapped ")),
        "mma 64", "mma 128",
    ]  # fmt: skip
    for dtype, kernel in itertools.product((torch.bfloat16, torch.float16), expected):
        assert f"{kernel}, {dtype}, ieee" in cases_of_kernels
    fma = [
        f"fma {tile}{quads}"
        for tile in ("256x128", "128x128", "128x64", "64x64", "32x64", "32x32")
        for quads in ("", " quads of a", " quads of b", " quads of a b")
    ]
    for kernel in ("gemv", "gemv swapped", *fma):
        assert f"{kernel}, torch.float32, ieee" in cases_of_kernels


@pytest.mark.parametrize("linear", [False, True], ids=["product", "layer"])
@pytest.mark.slow
def test_no_other_size_is_given_another_kernel(plans: Plans, linear: bool) -> None:
    """The GPU tests, here and of fused_linear_gelu, run every kernel that any size gets."""
    draw = random.Random(0)

    def size() -> int:
        drawn = int(2 ** draw.uniform(0, 15))
        return draw.choice([drawn, (drawn + 7) // 8 * 8, (drawn + 63) // 64 * 64])

    drawn = []
    for _ in range(20_000):
        dtype, precision, layouts = draw.choice(kinds(linear))
        drawn.append(Case(size(), size(), size(), layouts, dtype, precision))
    others = kernels(plans, drawn, linear).keys() - smallest(plans, linear).keys()
    assert not others


@pytest.mark.parametrize("linear", [False, True], ids=["product", "layer"])
@pytest.mark.parametrize("device", [A100, "8.9,142,99", "9.0,78,227", "9.0,114,227", H200, "B200"])
def test_no_plan_needs_a_kernel_that_is_left_empty(plans: Plans, device: str, linear: bool) -> None:
    """ptx/planned.cuh leaves kernels empty by these rules."""
    hopper = device == H200 or device.startswith("9.0")
    cases = [*anything(linear)[::5], *(BORDERS if not linear else ())]
    for case, plan in zip(cases, plans(cases, device, linear), strict=True):
        if plan.startswith("simt"):
            assert case.dtype is torch.float64 or (case.k == 0 and case.dtype.itemsize == 2), case
        if hopper:
            assert not re.match(r"stream (swapped )?(16|32)", plan), case
            assert not (plan.startswith("mma") and case.precision == "tf32x3"), case


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_sanitizer_is_shown_every_family(plans: Plans, precision: str) -> None:
    def case_of(sample: Sample) -> Case:
        a, b = sample.tensors
        layouts = "lk"[a.layout == "contiguous"] + "kl"[b.layout == "contiguous"]
        return Case(a.shape[0], b.shape[1], a.shape[1], layouts, a.dtype, precision)

    samples = find(PRECISIONS[precision]).kernel_samples
    given = families(plans, [case for case in anything() if case.precision == precision])
    if precision != "ieee":  # the same kernels multiply and add for matmul
        given = {family for family in given if not family.startswith(("gemv", "fma"))}
    assert given <= families(plans, [case_of(sample) for sample in samples])


@needs_gpu
def test_every_kernel_agrees_with_float64(plans: Plans, cases_of_kernels: dict[str, Case]) -> None:
    # Elsewhere a case would not run the kernel that it is there for.
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the cases are chosen for compute capability 9.0")
    failed = []
    cases = [*BORDERS, *PACKED, *cases_of_kernels.values()]
    for case, plan in zip(cases, plans(cases), strict=True):
        a, b = case.operands()
        actual = cuda_ops.matmul(a, b, precision=case.precision)
        exact = a.double() @ b.double()
        error = (actual.double() - exact).norm() / exact.norm().clamp_min(1e-30)
        allowed = {"ieee": 2e-6, "tf32": 1e-3, "tf32x3": 2e-6}[case.precision]
        if case.dtype is not torch.float32:
            allowed = torch.finfo(case.dtype).eps
        if actual.numel() > 0 and not error <= allowed:
            failed.append(f"{case}: {plan}: {float(error):.2e}")
        if not torch.equal(actual, cuda_ops.matmul(a, b, precision=case.precision)):
            failed.append(f"{case}: {plan}: other bits the second time")
    assert not failed, "\n".join(failed)


@needs_gpu
@pytest.mark.parametrize("k", [256, 4096, 16384])
def test_tf32x3_is_as_exact_as_float32(k: int) -> None:
    a, b = torch.randn(512, k, device="cuda"), torch.randn(k, 640, device="cuda")
    exact = a.double() @ b.double()

    def error(c: torch.Tensor) -> float:
        return float((c.double() - exact).norm() / exact.norm())

    assert error(cuda_ops.matmul(a, b, precision="tf32x3")) <= 2 * error(a @ b)


@needs_gpu
@pytest.mark.parametrize("size", [40, 1000])
def test_tf32x3_of_infinities_and_huge_numbers(size: int) -> None:
    a, b = torch.randn(2, size, size, device="cuda")
    b = b.round()  # no low parts
    inf, nan = float("inf"), float("nan")
    for matrix, at, value in (
        (a, (3, 5), inf), (a, (4, 6), -inf), (a, (7, 1), nan), (b, (9, 2), inf), (b, (5, 8), -inf),
        (b, (11, 9), nan),
    ):  # fmt: skip
        matrix[at] = value
    a[12], a[12, 0] = 0.0, torch.finfo(torch.float32).max  # rounds to infinity in tf32
    b[0, :30] = 1.0
    expected = a @ b
    actual = cuda_ops.matmul(a, b, precision="tf32x3")
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batches_that_no_single_step_walks(dtype: torch.dtype) -> None:
    a = torch.randn(3, 1, 300, 521, device="cuda").to(dtype)
    b = torch.randn(4, 521, 600, device="cuda").to(dtype)
    for left, right in ((a, b), (a.mT.contiguous().mT, b.mT.contiguous().mT)):
        actual = cuda_ops.matmul(left, right, precision="tf32x3")
        torch.testing.assert_close(actual, torch.matmul(left, right), rtol=2e-2, atol=1e-3)


@needs_gpu
def test_copies_in_a_cuda_graph() -> None:
    a = torch.randn(1025, 2049, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2049, 1100, device="cuda", dtype=torch.bfloat16)
    cuda_ops.matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = cuda_ops.matmul(a, b)
        second = cuda_ops.matmul(a, -b)
    a.normal_()
    graph.replay()
    torch.testing.assert_close(first, torch.matmul(a, b), rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(second, -first, rtol=1.6e-2, atol=1e-2)


@needs_gpu
def test_the_first_call_of_a_thread() -> None:
    a, b = torch.randn(2, 512, 512, device="cuda", dtype=torch.bfloat16)
    expected = cuda_ops.matmul(a, b)
    found: list[torch.Tensor] = []
    with torch.cuda.device(a.device):
        cuda_ops.matmul(a, b)  # its memory serves the thread, which then asks for nothing else
        thread = threading.Thread(target=lambda: found.append(cuda_ops.matmul(a, b)))
        thread.start()
        thread.join()
    assert len(found) == 1 and torch.equal(found[0], expected)


@needs_gpu
def test_more_than_2_to_the_31_elements() -> None:
    a = torch.randn(70_000, 64, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(64, 40_000, device="cuda", dtype=torch.bfloat16)
    out = cuda_ops.matmul(a, b)
    assert out.numel() > 2**31
    torch.testing.assert_close(out[-100:], torch.matmul(a[-100:], b))
    torch.testing.assert_close(out[:, -100:], torch.matmul(a, b[:, -100:]))
