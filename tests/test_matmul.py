"""matmul: shapes, precisions, sharding, and every kernel that can be chosen."""

from __future__ import annotations

import itertools
import random
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Recorder, needs_gpu
from gemm_cases import (
    LAYOUTS,
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
from cuda_ops.dev import reload
from cuda_ops.ops.matmul import PRECISIONS
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import find


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("matmul")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


# --- the public function -------------------------------------------------------------------


SHAPES = [
    ((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 4)), ((2, 3, 5), (5,)), ((5,), (2, 5, 4)),
    ((2, 3, 5), (5, 4)), ((3, 5), (2, 5, 4)), ((2, 1, 3, 5), (4, 5, 6)), ((0, 5), (5, 4)),
    ((3, 0), (0, 4)), ((0,), (0,)), ((2, 0, 5), (5,)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@on_each_device
def test_shapes_follow_torch_matmul(a: tuple[int, ...], b: tuple[int, ...], device: str) -> None:
    x = torch.randn(a, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(b, dtype=torch.float64, device=device, requires_grad=True)
    ours, theirs = cuda_ops.matmul(x, y), torch.matmul(x, y)
    torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(ours.sum(), (x, y))
    torch.testing.assert_close(gradients, torch.autograd.grad(theirs.sum(), (x, y)))


# The last token of each sequence, a transposed batch, a batch that continues along one dim alone,
# and a single row for all of it.
@on_each_device
def test_views_of_a_batch_times_a_weight(device: str) -> None:
    weight = torch.randn(96, 128, device=device).bfloat16()
    x = torch.randn(12, 20, 5, 96, device=device).bfloat16()
    for view in (
        x[0, :, -1:], x[:, :, -1:], x.transpose(0, 2), x[0].transpose(0, 1), x[::2], x[:, ::2],
        x[:, :, :1].transpose(0, 1), x[0, :1, :1].expand(7, 1, 96),
    ):  # fmt: skip
        expected = torch.matmul(view.double(), weight.double())
        assert (cuda_ops.matmul(view, weight) - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("precision", ["high", None, ["ieee"]], ids=str)
def test_no_such_precision(precision: Any) -> None:
    expected = f"'precision': expected one of 'ieee', 'tf32', 'tf32x3', got {precision!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        cuda_ops.matmul(torch.ones(2, 2), torch.ones(2, 2), precision=precision)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "None"), ([[1.0]], "list"), (2.0, "float")],
    ids=str,
)
def test_what_is_no_tensor_is_refused_by_name(precision: str, value: Any, kind: str) -> None:
    for name in ("a", "b"):
        args = {"a": torch.ones(2, 2), "b": torch.ones(2, 2), name: value}
        expected = f"cuda_ops::matmul: argument '{name}': expected a tensor, got {kind}"
        with pytest.raises(RuntimeError, match=f"^{expected}$"):
            cuda_ops.matmul(**args, precision=precision)


REFUSED = [
    ((), (3,), "'a': expected at least 1 dims (..., k), got shape []"),
    ((3,), (), "'b': expected at least 1 dims (..., k), got shape []"),
    ((2, 5), (4,), "'b': expected dim 'k' of (..., k) to be 5, got shape [4]"),
    ((4,), (5, 2), "'b': expected dim 'k' of (..., k, n) to be 4, got shape [5, 2]"),
    ((2, 3, 4), (3, 4, 5),
     "'b': expected dims '...' of (..., k, n) to broadcast with [2], got shape [3, 4, 5]"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "expected"), REFUSED, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("device", ["meta", *DEVICES])
def test_shapes_are_refused_as_they_were_given(
    a: tuple[int, ...], b: tuple[int, ...], expected: str, device: str
) -> None:
    for precision, op in PRECISIONS.items():
        x, y = torch.ones(a, device=device), torch.ones(b, device=device)
        name = op if len(a) > 1 < len(b) else "matmul"
        with pytest.raises(RuntimeError, match=f"^cuda_ops::{name}: .*{re.escape(expected)}"):
            cuda_ops.matmul(x, y, precision=precision)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint32], ids=str)
def test_other_dtypes_are_called_by_their_names(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for device in ("cpu", "meta"):
        a = torch.zeros(2, 2, device=device).to(dtype)
        with pytest.raises(RuntimeError, match=f"'a': expected dtype .* or bfloat16, got {name}$"):
            cuda_ops.matmul(a, a)


def test_batch_dims_of_1_do_not_count() -> None:
    b = torch.randn(3, 4)
    a = torch.randn(*[1, 2] * 10, 2, 3)
    torch.testing.assert_close(cuda_ops.matmul(a, b), torch.matmul(a, b))
    expected = "matmul: argument 'a': expected at most 16 batch dims other than 1 in the result"
    with pytest.raises(RuntimeError, match=expected):
        cuda_ops.matmul(torch.ones([2] * 17 + [1, 3]), b)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_meta(precision: str) -> None:
    a, b = torch.empty(2, 3, 5, device="meta"), torch.empty(5, 4, device="meta")
    out = cuda_ops.matmul(a, b, precision=precision)
    assert out.device.type == "meta" and out.shape == (2, 3, 4)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
@on_each_device
def test_precisions(precision: str, device: str) -> None:
    a, b = torch.randn(200, 3000, device=device), torch.randn(3000, 136, device=device)
    exact = a.double() @ b.double()

    def error(c: torch.Tensor) -> float:
        return float((c.double() - exact).norm() / exact.norm())

    allowed = {"ieee": 1.0, "tf32": 4096.0, "tf32x3": 2.0}[precision]
    assert error(cuda_ops.matmul(a, b, precision=precision)) <= allowed * max(error(a @ b), 1e-7)
    halves = cuda_ops.matmul(a.bfloat16(), b.bfloat16(), precision=precision)
    assert halves.dtype is torch.bfloat16


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_autocast_lowers_every_precision(precision: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cuda_ops.matmul(torch.ones(2, 3), torch.ones(3, 2), precision=precision)
    assert out.dtype is torch.bfloat16


def test_compiled_with_vectors_and_precisions() -> None:
    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return cuda_ops.matmul(a, b) + cuda_ops.matmul(a, b, precision="tf32x3")

    a, b = torch.randn(3, 5), torch.randn(5)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), 2 * (a @ b))


def test_derivatives_of_any_order() -> None:
    a = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cuda_ops.matmul, (a, b))
    assert torch.autograd.gradgradcheck(cuda_ops.matmul, (a, b))


@pytest.mark.parametrize(
    ("a", "b", "shared"), [((8, 6, 5), (5, 4), 1), ((6, 5), (8, 5, 2), 0)], ids=str
)
def test_what_a_batch_shares_gets_one_product(
    a: tuple[int, ...], b: tuple[int, ...], shared: int
) -> None:
    inputs = torch.randn(a), torch.randn(b)
    matrix = inputs[shared].requires_grad_()
    out = cuda_ops.matmul(*inputs)
    with Recorder() as calls:
        torch.autograd.grad(out, matrix, torch.randn_like(out))
    assert calls.results("matmul") == [matrix.shape]
    assert calls.results("sum") == []


def test_a_factor_is_saved_for_the_other_ones_gradient() -> None:
    x, weight = torch.randn(2, 3, 5), torch.randn(5, 4)
    for function in (cuda_ops.matmul, torch.ops.cuda_ops.matmul):
        for wanted, expected in ((x, weight), (weight, x)):
            saved: list[torch.Tensor] = []
            args = [tensor.detach().requires_grad_(tensor is wanted) for tensor in (x, weight)]
            with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
                function(*args)
            assert [tensor.data_ptr() for tensor in saved] == [expected.data_ptr()]


def test_shards_as_torch_mm_does(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    cases = [
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Shard(1), Shard(1)),
        (Shard(1), Shard(0), Partial()),
    ]
    for place_a, place_b, expected in cases:
        a = DTensor.from_local(torch.randn(4, 6), mesh, [place_a], run_check=False)
        b = DTensor.from_local(torch.randn(6, 8), mesh, [place_b], run_check=False)
        with CommDebugMode() as communication:
            out = cuda_ops.matmul(a, b)
        assert communication.get_total_counts() == 0
        assert out.placements == (expected,)
        torch.testing.assert_close(out.to_local(), a.to_local() @ b.to_local())


def test_tokens_that_are_sharded_stay_where_they_are(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    for dim in (0, 1):
        a = DTensor.from_local(torch.randn(2, 4, 6), mesh, [Shard(dim)], run_check=False)
        b = DTensor.from_local(torch.randn(6, 8), mesh, [Replicate()], run_check=False)
        inputs = a.requires_grad_(), b.requires_grad_()
        with CommDebugMode() as communication:
            gradients = torch.autograd.grad(cuda_ops.matmul(*inputs).square().sum(), inputs)
        assert communication.get_total_counts() == 0
        assert [g.placements for g in gradients] == [(Shard(dim),), (Partial(),)]


# --- which kernel --------------------------------------------------------------------------


#: Borders that are no multiples of anything, and what is not for Hopper's kernels.
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
    swapped = "stream swapped 8 splits 4"
    for capability in (80, 90):
        assert plans(few, capability) == [
            "stream 8 splits 4", swapped, "stream 8 splits 4", "stream 8 splits 1"
        ]  # fmt: skip
    assert plans(few[:1], capability=75) == ["simt 64"]
    # Blocks of 8 splits: 256, which are no whole number for each SM, 384, nearly all that run at
    # once, and 512.
    waves = [Case(1, 4096, 14336), Case(1, 6144, 4096), Case(1, 8192, 8192)]
    assert plans(waves) == ["stream 8 splits 4", "stream 8 splits 8", "stream 8 splits 8"]
    more = [Case(9, 4096, 4096), Case(4096, 32, 4096), Case(33, 4096, 4096)]
    assert all(plan.startswith("hopper swapped 128x") for plan in plans([more[0], more[2]]))
    assert plans(more, capability=80) == [
        "stream 16 splits 8", "stream swapped 32 splits 8", "mma 64"
    ]  # fmt: skip
    vectors = [Case(m, n, 4096, dtype=torch.float32) for m, n in ((1, 4096), (4096, 2))]
    assert plans(vectors) == ["gemv", "gemv swapped"]
    assert plans([Case(16, 4096, 4096, "kl")])[0].startswith("hopper swapped 128x16")
    # 80 narrow tiles leave SMs idle, 224 are one or two for each.
    assert plans([Case(64, 10240, 8192), Case(64, 28672, 4096), Case(64, 5120, 5120)]) == [
        "hopper 128x160 splits 2 grid 128", "hopper 128x224 splits 1 grid 128",
        "hopper swapped 128x64 splits 3 grid 120",
    ]  # fmt: skip
    assert plans([Case(16, 4096, 4096, aligned=False)], capability=80) == ["mma 64"]
    # 1.94 and 3.88 waves of 132 SMs; tiles of 256 columns would make 1.21 and 3.39.
    assert plans([Case(512, 10240, 8192)]) == ["hopper 128x160 splits 1 pairs grid 132"]
    # Of what takes long enough for power to limit it, wide tiles, though waves are emptier.
    assert plans([Case(4096, 28672, 8192)]) == ["hopper 128x256 splits 1 pairs grid 132"]
    assert plans([Case(1024, 14336, 4096)]) == ["hopper 128x224 splits 1 pairs grid 132"]
    # A pair below four rows of tiles would compute the fifth twice.
    assert plans([Case(640, 10240, 4096)]) == ["hopper 128x224 splits 1 grid 132"]
    assert plans([Case(128, 4096, 4096)]) == ["hopper 128x128 splits 3 grid 96"]
    unaligned = plans([Case(4096, 4096, 4096, aligned=False)])[0]
    assert unaligned.startswith("pack a b, hopper 128x256 splits")
    assert plans([Case(64, 64, 64, aligned=False)]) == ["mma 64"]
    assert plans([Case(3000, 3000, 8, aligned=False)]) == ["mma 128"]
    assert plans([Case(4096, 4096, 4096)], capability=80) == ["mma 128"]
    assert plans([Case(4096, 4096, 4096)], capability=75) == ["simt 64"]
    float32 = [Case(size, size, size, dtype=torch.float32) for size in (4096, 1024, 512)]
    assert plans(float32) == ["fma 256x128", "fma 128x64", "fma 32x64"]
    assert plans(float32, capability=80) == ["fma 128x128", "fma 64x64", "fma 32x32"]
    layouts = [Case(4096, 4096, 4096, order, torch.float32) for order in ("kl", "lk", "ll")]
    assert [plan[12:] for plan in plans(layouts)] == ["quads of b", "quads of a", "quads of a b"]
    assert plans([Case(4096, 4096, 4096, "ll", torch.float32, aligned=False)]) == ["fma 256x128"]
    assert plans(float32, capability=75) == ["simt 64"] * 3
    for precision, layouts, expected in (
        ("tf32", "kk", "hopper 128x256"),
        ("tf32", "kl", "pack b, hopper 128x256"),
        ("tf32", "lk", "pack a, hopper 128x256"),
        ("tf32x3", "kk", "pack a b, hopper 128x128"),
    ):
        case = Case(4096, 4096, 4096, layouts, torch.float32, precision)
        assert plans([case])[0].startswith(expected)
        assert plans([case], capability=80) == ["mma 128"]
    assert plans([Case(2000, 2000, 8, dtype=torch.float32, precision="tf32x3")]) == ["fma 128x128"]
    assert plans([Case(4096, 4096, 4096, dtype=torch.float64)]) == ["simt 64"]
    assert plans([Case(0, 8, 8), Case(8, 8, 0)]) == ["nothing", "simt 64"]
    # What the streaming kernel's ints would not hold: blocks. What the Hopper kernel's would
    # not: tiles plus the grid, and K of both parts.
    assert plans([Case(3, 3, 8, batch=2**31)]) == ["mma 128"]
    assert plans([Case(65, 65, 8, batch=2**30)]) == ["mma 128"]
    assert plans([Case(8, 8, 2**30, dtype=torch.float32, precision="tf32x3")]) == ["fma 32x32"]


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_rows_that_go_on_across_a_batch_are_one_product(plans: Plans, capability: int) -> None:
    n = k = 4096
    for case, folded in (
        # Whole sequences; the last token of each, whatever its row stride; one row for all.
        (Case(16, n, k, batch=64, walk=(k, 16 * k)), Case(1024, n, k)),
        (Case(1, n, k, batch=64, walk=(k, 128 * k)), Case(64, n, k, walk=(128 * k, 0))),
        (Case(1, n, k, batch=64, walk=(3, 128 * k)), Case(64, n, k, walk=(128 * k, 0))),
        (Case(1, n, k, batch=64, walk=(k, 0)), Case(64, n, k, walk=(0, 0))),
    ):
        assert plans([case], capability) == plans([folded], capability), case


def test_rows_that_do_not_go_on_are_copied_where_that_pays(plans: Plans) -> None:
    n = k = 4096
    few, many = Case(16, n, k, batch=64, walk=(64 * k, k)), Case(2047, n, k, walk=(k, 2048 * k))
    assert plans([few])[0] == "pack a, " + plans([Case(1024, n, k)])[0]
    # Each has tiles enough of its own.
    assert "pack" not in plans([replace(many, batch=8)])[0]


def test_copies_are_chosen_where_they_pay(plans: Plans) -> None:
    for case, plan in zip(PACKED, plans(PACKED), strict=True):
        assert plan.startswith("pack"), f"{case}: {plan}"
    assert not any("pack" in plan for plan in plans(PACKED, capability=80))


@pytest.fixture(scope="module")
def cases_of_kernels(plans: Plans) -> dict[str, Case]:
    return smallest(plans)


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
def test_no_other_size_is_given_another_kernel(plans: Plans, linear: bool) -> None:
    """Of those that the GPU tests, here and of fused_linear_gelu, run."""
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
