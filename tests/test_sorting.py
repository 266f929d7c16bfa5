"""bitonic_sort and bitonic_topk against torch.sort: order, stability, bits, every path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from conftest import needs_gpu, room_for
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_ops
from cuda_ops.compile_ops import reload


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("bitonic_sort", "bitonic_topk")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGER = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
on_each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", FLOATING + INTEGER, ids=lambda d: str(d)[6:])

KINDS = ("random", "special", "few", "clusters", "equal", "sorted")


def data(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int = 0) -> torch.Tensor:
    """Values that some way of sorting finds hard."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if dtype == torch.bool:
        return integers(0, 2).to(dtype)
    if kind == "few":
        return integers(0, 3).to(dtype)
    if kind == "equal":
        return torch.ones(shape, dtype=dtype)
    if kind == "sorted":
        return torch.arange(math.prod(shape)).view(shape).to(dtype)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        if kind == "special":
            return torch.tensor([limits.min, limits.max, 0, 1], dtype=dtype)[integers(0, 4)]
        if kind == "clusters":  # one far away, so that the others differ in their last bits alone
            return torch.where(integers(0, 100) == 0, limits.max, integers(0, 127)).to(dtype)
        return torch.randint(limits.min, limits.max, shape, generator=generator).to(dtype)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "special":
        edges = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0]).double()
        return torch.where(integers(0, 2) == 0, edges[integers(0, 6)], normal).to(dtype)
    if kind == "clusters":
        return torch.where(integers(0, 100) == 0, -1e4, 1 + normal * 1e-4).to(dtype)
    return normal.to(dtype)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Gathers integers: torch's own gather of bfloat16 does not keep the bits of NaN."""
    return x.contiguous().view(_BITS[x.dtype.itemsize])


def gathered(values: torch.Tensor, x: torch.Tensor, dim: int, indices: torch.Tensor) -> bool:
    """``values`` are bit for bit those of ``x`` at ``indices``."""
    return values.dtype == x.dtype and torch.equal(bits(values), bits(x).gather(dim, indices))


def agrees(x: torch.Tensor, device: str, dim: int = -1, descending: bool = False) -> None:
    """With torch.sort on the CPU, which is stable and knows NaN of either sign."""
    values, indices = cuda_ops.bitonic_sort(x.to(device), dim, descending, True)
    expected = torch.sort(x, dim=dim, descending=descending, stable=True)[1]
    assert values.dtype == x.dtype and indices.dtype == torch.int64
    assert torch.equal(indices.cpu(), expected)
    assert gathered(values.cpu(), x, dim, expected)


def first_agree(x: torch.Tensor, k: int, device: str, dim: int = -1, largest: bool = True) -> None:
    each_first_agrees(x, [k], device, dim, largest)


def each_first_agrees(
    x: torch.Tensor, kept: Iterable[int], device: str, dim: int = -1, largest: bool = True
) -> None:
    """One sort by torch for all of ``kept``: those of long rows take longer than all else."""
    on_device = x.to(device)
    sorted_ = torch.sort(x, dim=dim, descending=largest, stable=True)[1]
    for k in kept:
        values, indices = cuda_ops.bitonic_topk(on_device, k, dim, largest)
        expected = sorted_.narrow(dim, 0, k)
        assert torch.equal(indices.cpu(), expected), k
        assert gathered(values.cpu(), x, dim, expected), k


# Rows and their length: each size of network, of block and of tile, and their borders.
SHAPES = [
    (3, 1), (70, 2), (5, 4), (70, 4), (33, 5), (257, 15), (100, 16), (50, 17), (65, 32), (77, 33),
    (31, 64), (45, 65), (19, 128), (9, 129), (9, 256), (7, 257), (6, 512), (5, 513), (5, 1000),
    (5, 1024), (3, 1025), (3, 2047), (2, 4096), (2, 8191), (2, 16385), (2, 22528), (1, 22529),
    (2, 32768), (2, 32769), (1, 65537), (3, 100003), (9, 65536), (1, 131072), (2, 131073),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dtype
@on_each_device
@pytest.mark.quick(60)
def test_every_length(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    kinds = KINDS if math.prod(shape) < 10_000 or device == "cuda" else KINDS[:2]
    for kind in kinds:
        x = data(shape, dtype, kind, sum(shape))
        agrees(x, device)
        agrees(x, device, descending=True)


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 64, 65, 100])
@each_dtype
@on_each_device
@pytest.mark.quick(20)
def test_the_first_k(k: int, dtype: torch.dtype, device: str) -> None:
    for shape in [(3, k), (130, 129), (3, 4097), (1, 40_000)]:
        for kind in ("random", "special", "few"):
            if k <= shape[1]:
                first_agree(data(shape, dtype, kind), k, device)
                first_agree(data(shape, dtype, kind), k, device, largest=False)


#: On a CPU every length takes the same way.
SELECTED = [(3, 1025), (2, 5003)]
SELECTED_BY_GPUS = [(1, 20_011), (300, 4099), (65, 131_072), (2, 300_007), (1, 1 << 21)]


@pytest.mark.parametrize(("device", "shape"), [
    *(("cpu", shape) for shape in SELECTED),
    *(pytest.param("cuda", one, marks=needs_gpu) for one in SELECTED + SELECTED_BY_GPUS),
], ids=str)  # fmt: skip
@each_dtype
@pytest.mark.quick(20)
def test_by_selecting_or_sorting(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """More than a warp keeps: ties across the k-th, NaN, rows in order and in reverse."""
    few = {min(k, shape[1]) for k in (65, 256, 512, 2048, 8192)}
    for kind in KINDS if device == "cuda" else ("special", "few"):
        x = data(shape, dtype, kind)
        for largest in (True, False):
            each_first_agrees(x, few | {shape[1] // 2, shape[1]}, device, largest=largest)
        each_first_agrees(x.flip(1), few, device)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(-1, -2),
    "stepped": lambda x: x[..., ::2],
    "sliced": lambda x: x[..., 1:-2],
    "whole words": lambda x: x[..., :32],  # of a warp's rows, which do not follow each other
    "permuted": lambda x: x.permute(2, 0, 1),
    "odd start": lambda x: x.flatten()[1:-1].view(2, -1),
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "expanded last": lambda x: x[..., :1].expand(-1, -1, 9),
    "one column": lambda x: x[..., :1],
    "flipped": lambda x: x.flip(-1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@on_each_device
def test_any_layout_and_dim(view: str, dim: int, device: str) -> None:
    x = data((4, 30, 50), torch.float32, "special")
    on_device = VIEWS[view](x.to(device))
    values, indices = cuda_ops.bitonic_sort(on_device, dim)
    expected = torch.sort(VIEWS[view](x), dim=dim, stable=True)
    assert torch.equal(indices.cpu(), expected[1])
    assert gathered(values.cpu(), VIEWS[view](x), dim, expected[1])
    assert indices.shape[dim] < 2 or indices.stride(dim) == 1
    first_agree(VIEWS[view](x), 1, device, dim)


def test_topk_of_no_dims_is_its_element() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    for k in (0, 1):
        for function in (cuda_ops.bitonic_topk, torch.topk):
            values, indices = function(x, k)
            assert (values, indices, values.shape) == (3, 0, ())
            assert torch.autograd.grad(values, x)[0] == 1
        mapped = torch.vmap(lambda one, k=k: cuda_ops.bitonic_topk(one, k)[0])(x.expand(2))
        assert torch.equal(mapped, x.expand(2))


@on_each_device
def test_nothing_and_a_single_number(device: str) -> None:
    for shape, dim in [((0,), 0), ((3, 0), 1), ((3, 0), 0), ((0, 5), 1), ((2, 0, 3), 0)]:
        x = torch.empty(shape, device=device)
        values, indices = cuda_ops.bitonic_sort(x, dim)
        assert values.shape == indices.shape == x.shape
        assert cuda_ops.bitonic_topk(x, 0, dim)[0].shape[dim] == 0
    scalar = torch.tensor(3.0, device=device)
    for dim in (0, -1):
        values, indices = cuda_ops.bitonic_sort(scalar, dim)
        assert values.item() == 3 and indices.item() == 0
        assert cuda_ops.bitonic_topk(scalar, 1, dim)[0].item() == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: cuda_ops.bitonic_sort(x, 2), "'dim': expected a dim from -2 to 1, got 2"),
        (lambda x: cuda_ops.bitonic_sort(x, -3), "'dim': expected a dim from -2 to 1, got -3"),
        (lambda x: cuda_ops.bitonic_topk(x, 6), "'k': expected a number from 0 to .* 5, got 6"),
        (lambda x: cuda_ops.bitonic_topk(x, -1), "'k': expected a number from 0 to .* 5, got -1"),
        (lambda x: cuda_ops.bitonic_sort(x.cfloat()), "argument 'x': expected dtype float64"),
    ],
)
@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_refusals(call: Callable[[torch.Tensor], Any], message: str, device: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.ones(3, 5, device=device))


def test_nan_payloads_and_signed_zeros_survive() -> None:
    bits = torch.tensor([0x7FC00001, 0, -0x80000000, 0x7FC00002, -0x400000 + 3, 0x3F800000])
    x = bits.to(torch.int32).view(torch.float32)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        values, indices = cuda_ops.bitonic_sort(x.to(device))
        assert indices.tolist() == [1, 2, 5, 0, 3, 4]
        assert torch.equal(values.cpu().view(torch.int32), x.view(torch.int32)[indices.cpu()])
        assert cuda_ops.bitonic_sort(x.to(device), descending=True)[1].tolist() == [
            0,
            3,
            4,
            5,
            1,
            2,
        ]


# --- properties -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(0, 2100), st.sampled_from(FLOATING + INTEGER),
    st.sampled_from(KINDS), st.integers(0, 2**16),
)  # fmt: skip
def test_properties(rows: int, n: int, dtype: torch.dtype, kind: str, seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = data((rows, n), dtype, kind, seed).to(device)
    values, indices = cuda_ops.bitonic_sort(x)
    # Indices are a permutation, and values are the elements there.
    everything = torch.arange(n, device=device).expand(rows, n)
    assert torch.equal(torch.sort(indices).values, everything)
    assert gathered(values, x, 1, indices)
    # In order, NaN last, equal elements in their old order.
    a, b = values[:, :-1], values[:, 1:]
    nan = b.isnan() if dtype.is_floating_point else torch.zeros_like(b, dtype=torch.bool)
    assert ((a <= b) | nan).all()
    same = (a == b) | (nan & (a != a))
    assert (~same | (indices[:, :-1] < indices[:, 1:])).all()
    # Sorted again, nothing moves; the other way round the values are reversed.
    assert torch.equal(cuda_ops.bitonic_sort(values)[1], everything)
    reverse, _ = cuda_ops.bitonic_sort(x, descending=True)
    torch.testing.assert_close(reverse.flip(1), values, rtol=0, atol=0, equal_nan=True)
    # On the CPU: torch's CUDA sort orders NaNs by their bits, stable or not.
    assert torch.equal(indices.cpu(), torch.sort(x.cpu(), stable=True)[1])


# --- 8-byte keys in long rows -----------------------------------------------------------------


def wide_keys(kind: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Bits of 64-bit keys that more or fewer of their bytes tell apart."""
    generator = torch.Generator().manual_seed(seed)
    everything = torch.iinfo(torch.int64)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    random = integers(everything.min, everything.max)
    columns = torch.arange(shape[1]).expand(shape)
    if kind == "small numbers":
        return random & 0xFFFFF
    if kind == "few":  # also of doubles
        return random.flatten()[integers(0, 5)]
    if kind == "half alike":
        return torch.where(integers(0, 2) == 0, 0, random)
    if kind == "names":  # each many times
        return random.flatten()[integers(0, 3000)]
    if kind == "one missing value":
        return torch.where(integers(0, 100) == 0, -1, random & 0xFFFFF)
    if kind == "crowds":  # that are alike in all but the last byte
        return torch.where(columns % 512 == 3, 77 << 40 | random & 0xFF, random)
    if kind == "unseen":  # by a sample: higher bytes
        return torch.where((columns > 0) & (columns < 9), random, random & 0xFFFFFF)
    if kind == "unseen, lower bytes":
        few = integers(0, 3) << 40
        return torch.where((columns > 0) & (columns < 9), few | random & 0xFF, few)
    if kind == "in order":
        return torch.arange(math.prod(shape)).view(shape) * 1_000_003
    if kind == "doubles":
        return torch.randn(shape, generator=generator, dtype=torch.float64).view(torch.int64)
    if kind == "special doubles":
        return data(shape, torch.float64, "special", seed).view(torch.int64)
    if kind == "rows apart":
        return (torch.arange(shape[0])[:, None] << 48) + (random & 0xFFFFFFFF)
    return random


WIDE = [
    "random", "small numbers", "few", "half alike", "names", "one missing value", "crowds",
    "unseen", "unseen, lower bytes", "in order", "doubles", "special doubles", "rows apart",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("kind", WIDE)
@on_each_device
def test_8_byte_keys_of_every_kind(kind: str, dtype: torch.dtype, device: str) -> None:
    shapes = [(2, 23_000)]
    if device == "cuda":
        shapes += [(1, 1 << 17), (5, 200_003), (40, 50_000), (1, (1 << 21) + 1)]
    for seed, shape in enumerate(shapes):
        x = wide_keys(kind, shape, seed).view(dtype)
        agrees(x, device)
        agrees(x, device, descending=True)


@on_each_device
def test_rows_without_results_take_no_time_however_many(device: str) -> None:
    rows = torch.empty(1, 4, device=device).expand(1 << 40, 4)
    assert cuda_ops.bitonic_topk(rows, 0)[1].shape == (1 << 40, 0)
    assert cuda_ops.bitonic_sort(rows[:, :0])[1].shape == (1 << 40, 0)


# --- gradients, batching, sharding ------------------------------------------------------------


@on_each_device
def test_first_and_second_derivatives(device: str) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    for dim in (0, 1):
        assert torch.autograd.gradcheck(lambda v, d=dim: cuda_ops.bitonic_sort(v, d)[0], x)
        assert torch.autograd.gradcheck(lambda v, d=dim: cuda_ops.bitonic_topk(v, 2, d)[0], x)
        assert torch.autograd.gradgradcheck(lambda v, d=dim: cuda_ops.bitonic_sort(v * v, d)[0], x)
    assert not cuda_ops.bitonic_sort(x)[1].requires_grad


@on_each_device
def test_each_of_a_batch(device: str) -> None:
    x = torch.randn(4, 5, 6, device=device)
    for at in range(3):
        for dim in (0, 1, -1):
            actual = torch.vmap(lambda v, d=dim: cuda_ops.bitonic_sort(v, d), in_dims=at)(x)
            for i in range(x.shape[at]):
                expected = torch.sort(x.select(at, i), dim=dim)
                assert torch.equal(actual[0][i], expected[0])
                assert torch.equal(actual[1][i], expected[1])
    scalars = torch.randn(7, device=device)
    assert torch.equal(torch.vmap(cuda_ops.bitonic_sort)(scalars)[0], scalars)


@on_each_device
def test_compiled_with_other_sizes(device: str) -> None:
    compiled = torch.compile(
        lambda v: cuda_ops.bitonic_topk(cuda_ops.bitonic_sort(v, 0)[0] * 2, 3, 1),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for shape in [(4, 5), (6, 7)]:
        x = torch.randn(shape, device=device)
        expected = torch.topk(torch.sort(x, dim=0)[0] * 2, 3, 1)
        assert torch.equal(compiled(x)[0], expected[0])


def test_shards_of_other_dims_stay_where_they_are(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    local = torch.randn(4, 3)
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    with CommDebugMode() as communication:
        values, _ = cuda_ops.bitonic_sort(x, 1)
        first, _ = cuda_ops.bitonic_topk(x, 2)
    assert communication.get_total_counts() == 0
    assert values.placements == first.placements == (Shard(0),)
    assert torch.equal(values.to_local(), torch.sort(local)[0])


# --- on a GPU alone ---------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("shape", [(300, 100), (30, 5000), (3, 100_000), (2, 300_000)], ids=str)
def test_in_a_cuda_graph(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda")
    cuda_ops.bitonic_sort(x), cuda_ops.bitonic_topk(x, 7), cuda_ops.bitonic_topk(x, 70)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda_ops.bitonic_sort(x)
        first, more = cuda_ops.bitonic_topk(x, 7), cuda_ops.bitonic_topk(x, 70)
    for seed in range(3):
        x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out[1], torch.sort(x, stable=True)[1])
        assert torch.equal(first[0], torch.topk(x, 7)[0])
        assert torch.equal(more[0], torch.topk(x, 70)[0])


@needs_gpu
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        ((2, 1 << 18), [*WIDE, *reversed(WIDE)]),
        ((1, 1 << 26), ["random", "crowds", "small numbers"]),
    ],
    ids=["one launch", "one for each step"],
)
def test_one_cuda_graph_for_all_keys(shape: tuple[int, int], kinds: list[str]) -> None:
    """How many passes there are depends on the keys, what is launched does not."""
    x = torch.zeros(shape, dtype=torch.int64, device="cuda")
    cuda_ops.bitonic_sort(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda_ops.bitonic_sort(x)
    for seed, kind in enumerate(kinds):
        x.copy_(wide_keys(kind, shape, seed))
        graph.replay()
        expected = torch.sort(x, stable=True)
        assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])


@needs_gpu
@pytest.mark.parametrize(("rows", "n"), [(1 << 25, 65), (70_000, 33_000), (1, (1 << 31) + 5)])
def test_more_than_2_to_the_31_elements(rows: int, n: int) -> None:
    def check() -> None:
        part = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
        x = part.repeat(rows * n // part.numel() + 1)[: rows * n].view(rows, n)
        values, indices = cuda_ops.bitonic_sort(x)
        assert (values[:, 1:] >= values[:, :-1]).all()
        for row in (0, rows // 2, rows - 1):
            assert torch.equal(values[row], x[row][indices[row]])
            tied = values[row, 1:] == values[row, :-1]
            assert (indices[row, 1:] > indices[row, :-1])[tied].all()

    with room_for("cuda", 70e9):
        check()
