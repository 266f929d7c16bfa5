"""``cache_write_``: slots that differ, for tests and benchmarks; indexing is reference and peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return reference


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Writes the tokens whose slots are in the cache, one after the other."""
    block = key_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < key_cache.shape[0] * block:
            continue
        for rows, cache, scale in (
            (key, key_cache, key_scale),
            (value, value_cache, value_scale),
        ):
            row = rows[token] if scale is None else rows[token] / scale
            if cache.dtype in _EIGHT_BITS:
                row = row.clamp(-torch.finfo(cache.dtype).max, torch.finfo(cache.dtype).max)
            cache[slot // block, slot % block] = row.to(cache.dtype)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import LAYOUTS, OVERLAPPING, Sample, TensorArg
    from cuda_ops.testing.values import VALUES

    read = st.sampled_from(LAYOUTS)
    written = st.sampled_from([layout for layout in LAYOUTS if layout not in OVERLAPPING])
    dims = st.sampled_from((1, 2, 3, 5, 8, 16, 17, 33, 0))
    cached = st.sampled_from((*_FLOATING, *_EIGHT_BITS))

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        heads, blocks, block = (draw(st.sampled_from((1, 2, 3, 4, 0))) for _ in range(3))
        tokens = min(draw(st.sampled_from((1, 2, 3, 7, 9, 0))), blocks * block)
        shapes = [(heads, draw(dims)) for _ in range(2)]
        dtype = draw(st.sampled_from(_FLOATING))
        rows = [TensorArg((tokens, *shape), dtype, draw(read)) for shape in shapes]
        caches = [
            TensorArg((blocks, block, *shape), draw(cached), draw(written)) for shape in shapes
        ]
        slots = TensorArg(
            (tokens,), torch.int64, draw(written), below=blocks * block, distinct=True
        )
        scales = [draw(st.sampled_from((None, TensorArg((), torch.float32)))) for _ in range(2)]
        values = draw(st.sampled_from(VALUES))
        if any(cache.dtype in _EIGHT_BITS for cache in caches):
            values = "equal"  # the reference, in float64, cannot know which numbers are too large
        return Sample((*rows, *caches, slots, *scales), values, draw(st.integers(0, 2**16)))

    return drawn()


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns whole vectors and single elements, more than a block of them and several tokens in
    one.
    """
    from cuda_ops.testing.samples import Sample, TensorArg

    half = torch.bfloat16

    def sample(heads: int, dim: int, cached: torch.dtype) -> Sample:
        rows = TensorArg((70, heads, dim), half)
        cache = TensorArg((10, 16, heads, dim), cached)
        slots = TensorArg((70,), torch.int64, below=160, distinct=True)
        return Sample((rows, rows, cache, cache, slots))

    return [
        sample(heads, dim, cached)
        for heads, dim in ((1, 64), (8, 128), (16, 129), (3, 7))
        for cached in (half, torch.float8_e4m3fn)
    ]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(indexed)


def indexed(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Writes the tokens by an assignment, if all slots are in the cache."""
    block = key_cache.shape[1]
    at = slots // block, slots % block
    for rows, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        if scale is not None:  # torch would round the scale of a half on a GPU
            rows = rows.to(torch.promote_types(rows.dtype, scale.dtype)) / scale
        if cache.dtype not in _EIGHT_BITS:
            cache[at] = rows.to(cache.dtype)
            continue
        most = torch.finfo(cache.dtype).max
        scaled = rows.float().clamp(-most, most)
        cache.view(torch.uint8)[at] = scaled.to(cache.dtype).view(torch.uint8)


#: Tokens, heads, elements of a head, and why.
_POINTS = (
    (64, 8, 128, "one token of each of 64 sequences"),
    (512, 8, 128, "a chunk of a prompt"),
    (16_384, 8, 128, "prompts of Llama 3"),
    (65_536, 8, 128, "the same, more of them"),
    (65_536, 1, 128, "few heads: multi-query attention, or a part of many"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    half = torch.bfloat16
    return [
        _case(*point, cached) for cached in (half, torch.float8_e4m3fn) for point in _POINTS
    ] + [_case(*_POINTS[3], half, block=256)]


def _case(
    tokens: int, heads: int, dim: int, reason: str, cached: torch.dtype, block: int = 16
) -> BenchmarkCase:
    has_scales = cached in _EIGHT_BITS

    def make_inputs(device: torch.device) -> tuple[Any, ...]:
        rows = [
            torch.randn(tokens, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(2)
        ]
        blocks = -(-tokens // block)  # each block of a sequence is somewhere in the cache
        caches = [torch.zeros(blocks, block, heads, dim, device=device).to(cached) for _ in rows]
        order = torch.randperm(blocks, device=device)
        slots = (order[:, None] * block + torch.arange(block, device=device)).flatten()[:tokens]
        scales = [torch.full((), 0.05, device=device) for _ in rows] if has_scales else []
        return *rows, *caches, slots, *scales

    label = f"{tokens}x{heads}x{dim} bfloat16 to {str(cached).removeprefix('torch.')}"
    return BenchmarkCase(
        label + (f", blocks of {block}" if block != 16 else ""),
        make_inputs,
        bytes=2 * tokens * heads * dim * (2 + cached.itemsize) + 8 * tokens,
        reason=reason,
        dtype=torch.bfloat16,
        arithmetic="fp32",
    )
