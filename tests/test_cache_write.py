"""cache_write_ against torch's own indexing and conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.ops.cache_write_ import indexed, reference


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("cache_write_")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]

#: Views of rows [T, heads, D].
ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "part of a projection": lambda x: F.pad(x, (0, 0, 2, 3))[:, 2:-3],
    "part of a head": lambda x: F.pad(x, (8, 8))[..., 8:-8],
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "an odd start": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
}
#: How caches [blocks, block, heads, D] are laid out.
CACHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "elements first": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "keys beside values": lambda x: torch.stack((x, x), 1)[:, 1],
    "layers": lambda x: torch.stack((x, x, x), 2)[:, :, 1],
}


def narrowed(rows: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """What is stored, by torch: a quotient in float32, or in float64, and one conversion."""
    wide = rows.double() if torch.float64 in (rows.dtype, dtype) else rows.float()
    if scale is not None:
        wide = wide / scale.to(wide.dtype)
    elif rows.dtype is dtype:
        return rows
    if dtype in EIGHT_BITS:
        most = torch.finfo(dtype).max
        wide = wide.float().clamp(-most, most)
    return wide.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as integers of their size: a view of a contiguous tensor."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.dtype.itemsize])


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(device)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    blocks, block = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    order = draw(st.permutations(range(blocks * block)))
    outside = st.sampled_from([-1, -7, -(2**62), blocks * block, 2**40])
    slots = [draw(outside) if draw(st.integers(0, 4)) == 0 else slot for slot in order]
    dims = st.sampled_from([0, 1, 3, 8, 16, 20, 64, 72])
    return {
        "caches": (blocks, block),
        "slots": slots[: draw(st.integers(0, len(slots)))],
        "heads": draw(st.integers(0, 4)),
        "dims": (draw(dims), draw(dims)),
        "dtype": draw(st.sampled_from(FLOATING)),
        "cached": [draw(st.sampled_from(FLOATING + 2 * EIGHT_BITS)) for _ in range(2)],
        "scales": [draw(st.sampled_from([None, 0.07, 3.0])) for _ in range(2)],
        "size": draw(st.sampled_from([1.0, 1.0, 300.0])),
        "rows": [draw(st.sampled_from(sorted(ROWS))) for _ in range(2)],
        "layouts": [draw(st.sampled_from(sorted(CACHES))) for _ in range(2)],
    }


@on_each_device
@settings(max_examples=250, deadline=None)
@given(call=calls())
def test_it_agrees_with_indexing(device: str, call: dict[str, Any]) -> None:
    blocks, block = call["caches"]
    slots = torch.tensor(call["slots"], dtype=torch.int64, device=device)
    rows, caches, scales = [], [], []
    for k in range(2):
        shape = (call["heads"], call["dims"][k])
        made = call["size"] * random((len(slots), *shape), torch.float32, device, k)
        made.view(-1)[::5] = -0.0
        rows.append(ROWS[call["rows"][k]](made.to(call["dtype"])))
        cache = random((blocks, block, *shape), call["cached"][k], device, 5 + k)
        caches.append(CACHES[call["layouts"][k]](cache))
        scale = call["scales"][k]
        scales.append(None if scale is None else torch.tensor(scale, device=device))
    expected = [bits(cache).clone() for cache in caches]
    kept = (slots >= 0) & (slots < blocks * block)
    for k, cache in enumerate(expected):
        stored = bits(narrowed(rows[k][kept], caches[k].dtype, scales[k]))
        cache.flatten(0, 1).index_put_((slots[kept],), stored)
    assert cuda_ops.cache_write_(*rows, *caches, slots, *scales) is None
    for k, cache in enumerate(caches):
        assert torch.equal(bits(cache), expected[k]), ("key", "value")[k]


@on_each_device
def test_nothing_around_the_slots_is_touched(device: str) -> None:
    for cached in (torch.bfloat16, torch.float8_e4m3fn):
        memory = random((6, 2, 4, 5, 24), cached, device, 0)
        before = bits(memory).clone()
        keys, values = memory[:, 0, :, 1:4, :16], memory[:, 1, :, 1:4, :16]
        rows = random((3, 3, 16), torch.bfloat16, device, 1)
        slots = torch.tensor([23, -1, 6], device=device)
        cuda_ops.cache_write_(rows, rows, keys, values, slots)
        changed = bits(memory) != before
        inside = torch.zeros_like(changed)
        for block, slot in ((5, 3), (1, 2)):
            inside[block, :, slot, 1:4, :16] = True
        assert changed.any() and not (changed & ~inside).any()


@on_each_device
@pytest.mark.parametrize("cached", EIGHT_BITS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_eight_bits_come_back(dtype: torch.dtype, cached: torch.dtype, device: str) -> None:
    """Every number of eight bits, halves between neighbors, and what is too large."""
    numbers = torch.arange(256, dtype=torch.uint8).view(cached).to(torch.float64)
    finite = numbers[numbers.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    inf = float("inf")
    edges = torch.tensor([1e5, -1e5, 464, 466, 480, 61440, 65535, 1e-9, inf, -inf, float("nan")])
    x = torch.cat((finite, between, edges.double())).to(dtype).to(device)
    x = F.pad(x, (0, -len(x) % 16)).view(-1, 1, 16)
    cache = torch.zeros(len(x), 1, 1, 16, device=device).to(cached)
    other = torch.zeros_like(cache)
    slots = torch.arange(len(x), device=device)
    cuda_ops.cache_write_(x, x, cache, other, slots, None, torch.tensor(2.0, device=device))
    for found, scale in ((cache, None), (other, torch.tensor(2.0, device=device))):
        wanted = narrowed(x, cached, scale).float().view(found.shape)
        assert torch.equal(found.float().isnan(), wanted.isnan())
        assert torch.equal(found.float().nan_to_num(), wanted.nan_to_num())
    assert float(cache.float().nan_to_num().max()) == torch.finfo(cached).max
    # A cache that is read by its scale: half a step off at most.
    kept = torch.zeros_like(cache)
    scale = torch.tensor(0.05, device=device)
    rows = random(tuple(x.shape), dtype, device, 3)
    cuda_ops.cache_write_(rows, rows, kept, other, slots, scale, scale)
    back = kept.double().view(rows.shape) * scale.double()
    step = torch.finfo(cached).eps / 2
    torch.testing.assert_close(back, rows.double(), rtol=1.01 * step, atol=0.05 * 2**-9)


@on_each_device
def test_the_last_of_equal_slots_or_any_on_a_gpu(device: str) -> None:
    rows = torch.arange(1.0, 65, device=device).view(64, 1, 1).expand(64, 2, 8).contiguous()
    keys, values = (torch.zeros(2, 3, 2, 8, device=device) for _ in range(2))
    cuda_ops.cache_write_(rows, rows, keys, values, torch.full((64,), 4, device=device))
    assert keys.flatten(0, 1)[[0, 1, 2, 3, 5]].count_nonzero() == 0
    written = keys.flatten(0, 1)[4]
    assert bool((written == 64).all() if device == "cpu" else (written >= 1).all())


@on_each_device
def test_the_peer_and_the_reference_agree(device: str) -> None:
    rows = [random((6, 2, 8), torch.bfloat16, device, k) for k in range(2)]
    wide = [x.double() for x in rows]
    slots = torch.tensor([7, 3, 0, 11, 4, 5], device=device)
    scales = [torch.tensor(s, device=device) for s in (0.5, 0.02)]
    for cached in (torch.bfloat16, *EIGHT_BITS):
        found = []
        for function, passed in (
            (cuda_ops.cache_write_, rows),
            (indexed, rows),
            (reference, wide),
        ):
            caches = [torch.zeros(3, 4, 2, 8, device=device).to(cached) for _ in range(2)]
            function(*passed, *caches, slots, *scales)
            found.append([bits(cache) for cache in caches])
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), cached


@on_each_device
def test_one_mapped_cache_for_each_sequence(device: str) -> None:
    rows = random((3, 4, 2, 8), torch.float32, device, 0)
    slots = torch.tensor([[0, 1, 2, 3], [5, -1, 4, 2], [3, 0, 1, 2]], device=device)
    keys, values = (torch.zeros(3, 2, 3, 2, 8, device=device) for _ in range(2))
    torch.vmap(cuda_ops.cache_write_, out_dims=None)(rows, 2 * rows, keys, values, slots)
    for i in range(3):
        expected = [torch.zeros(2, 3, 2, 8, device=device) for _ in range(2)]
        cuda_ops.cache_write_(rows[i], 2 * rows[i], *expected, slots[i])
        assert torch.equal(keys[i], expected[0]) and torch.equal(values[i], expected[1])


@on_each_device
def test_it_compiles(device: str) -> None:
    def step(rows: torch.Tensor, caches: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        cuda_ops.cache_write_(rows * 2, rows + 1, *caches, slots)
        return caches[0].sum() + rows.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    rows = random((5, 2, 8), torch.float32, device, 0)
    slots = torch.tensor([4, 2, -1, 0, 8], device=device)
    found = []
    for function in (step, compiled):
        caches = [torch.ones(3, 3, 2, 8, device=device) for _ in range(2)]
        found.append([function(rows, caches, slots), *caches])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": torch.float16}, "'value': expected dtype float32 like 'key', got float16"),
        (
            {"key_cache": torch.int8},
            "'key_cache': expected dtype float64, .*, float8_e4m3fn or float8_e5m2, got int8",
        ),
        ({"slots": torch.int32}, "'slots': expected dtype int64, got int32"),
        ({"key_scale": torch.float64}, "'key_scale': expected dtype float32, got float64"),
        ({"slots": (3,)}, r"'slots': expected dim 't' of \[t\] to be 2, got shape \[3\]"),
        ({"key_scale": (1,)}, r"'key_scale': expected exactly the dims \[\], got shape \[1\]"),
        ({"value_cache": (3, 5, 2, 4)}, r"'value_cache': expected dim 'b' of .* to be 4, got"),
        ({"key_cache": (3, 4, 1, 8)}, r"'key_cache': expected dim 'h' of .* to be 2, got"),
        ({"value": (2, 2, 5)}, r"'value_cache': expected dim 'e' of .* to be 5, got"),
    ],
)
def test_arguments_that_do_not_fit(device: str, changes: dict[str, Any], message: str) -> None:
    sizes = {
        "key": (2, 2, 8),
        "value": (2, 2, 4),
        "key_cache": (3, 4, 2, 8),
        "value_cache": (3, 4, 2, 4),
        "slots": (2,),
        "key_scale": (),
    }
    made = {}
    for name, size in sizes.items():
        dtype = torch.int64 if name == "slots" else torch.float32
        change = changes.get(name)
        shape = change if isinstance(change, tuple) else size
        dtype = change if isinstance(change, torch.dtype) else dtype
        made[name] = torch.zeros(shape, dtype=dtype, device=device)
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.cache_write_(**made)


@on_each_device
def test_gradients_and_shared_memory_are_refused(device: str) -> None:
    rows = torch.ones(2, 1, 8, device=device)
    caches = [torch.zeros(2, 2, 1, 8, device=device) for _ in range(2)]
    slots = torch.tensor([0, 3], device=device)
    with pytest.raises(RuntimeError, match="'key': expected a tensor that requires no gradient"):
        cuda_ops.cache_write_(rows.clone().requires_grad_(), rows, *caches, slots)
    with pytest.raises(RuntimeError, match="'key_cache': expected memory of its own"):
        cuda_ops.cache_write_(rows, rows, caches[0], caches[0], slots)


@on_each_device
def test_rows_that_lie_in_the_cache_are_read_first(device: str) -> None:
    rows, values = torch.ones(2, 1, 8, device=device), torch.zeros(2, 2, 1, 8, device=device)
    slots = torch.tensor([1, 2], device=device)
    keys = torch.arange(4.0, device=device).view(2, 2, 1, 1).expand(2, 2, 1, 8).contiguous()
    cuda_ops.cache_write_(keys[0], rows, keys, values, slots)
    assert keys[:, :, 0, 0].flatten().tolist() == [0.0, 0.0, 1.0, 3.0]


# --- on a GPU alone ------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 64), (3, 72), (5, 7), (2, 5000)])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float32, *EIGHT_BITS])
def test_many_tokens(cached: torch.dtype, heads: int, dim: int) -> None:
    tokens, block = 3000, 16
    rows = [random((tokens, heads, dim), torch.bfloat16, "cuda", k) for k in range(2)]
    scale = torch.tensor(0.3, device="cuda")
    slots = torch.randperm(200 * block, device="cuda")[:tokens]
    slots[::7] = -1
    caches = [torch.zeros(200, block, heads, dim, device="cuda").to(cached) for _ in rows]
    cuda_ops.cache_write_(*rows, *caches, slots, scale)
    kept = slots >= 0
    for x, cache, by in zip(rows, caches, (scale, None), strict=True):
        wanted = narrowed(x[kept], cached, by)
        assert torch.equal(bits(cache.flatten(0, 1)[slots[kept]]), bits(wanted))
        assert int((cache.float().flatten(2).abs().sum(-1) > 0).sum()) == int(kept.sum())


@needs_gpu
def test_a_cache_of_more_than_2_to_the_31_elements() -> None:
    keys = torch.zeros((1 << 17) + 3, 16, 8, 128, device="cuda", dtype=torch.float8_e4m3fn)
    values = torch.zeros_like(keys)
    rows = random((4, 8, 128), torch.bfloat16, "cuda", 0)
    last = keys.shape[0] * 16 - 1
    cuda_ops.cache_write_(rows, rows, keys, values, torch.tensor([0, last, 77, -1], device="cuda"))
    wanted = narrowed(rows, keys.dtype, None)
    for cache in (keys, values):
        for token, slot in enumerate((0, last, 77)):
            assert torch.equal(bits(cache.flatten(0, 1)[slot]), bits(wanted[token]))


@needs_gpu
def test_in_a_cuda_graph() -> None:
    rows = random((9, 2, 64), torch.bfloat16, "cuda", 0)
    keys, values = (torch.zeros(4, 4, 2, 64, device="cuda") for _ in range(2))
    slots = torch.arange(9, device="cuda")
    cuda_ops.cache_write_(rows, rows, keys, values, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_ops.cache_write_(rows, rows, keys, values, slots)
    slots.add_(7)
    keys.zero_()
    graph.replay()
    assert torch.equal(keys.flatten(0, 1)[7:], rows.float())
    assert keys.flatten(0, 1)[:7].count_nonzero() == 0
