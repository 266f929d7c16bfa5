"""``quantize``: how many scales a row of blocks has, and what to compare and time it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive import rules
from cuda_ops.derive.checks import refuse
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    derived = rules.cuda_ops_fake(op)
    assert derived is not None

    def fake(
        x: torch.Tensor, dtype: torch.dtype, block: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale = derived(x, dtype, block)
        if block is None:
            return q, scale
        *loop, size = x.shape
        if block < 1 or size % block != 0:
            expected = f"a divisor of {size}, the size of dim 'n'"
            refuse(op, "block", expected, str(block))
        return q, scale.new_empty((*loop, size // block))

    return fake


# --- testing and timing --------------------------------------------------------------------


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return torch_quantize


def torch_quantize(
    x: torch.Tensor, dtype: torch.dtype, block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes as model code does, in float32."""
    blocks = x.float() if block is None else x.float().unflatten(-1, (-1, block))
    sizes, largest = blocks.abs(), 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    amax = sizes.amax(-1) if x.shape[-1] else sizes.sum(-1)
    # Not over a number, which torch turns into a product on a GPU.
    scale = amax / torch.full((), largest, device=x.device)
    scale = torch.where(scale == 0, 1.0, scale)
    q = blocks / scale.unsqueeze(-1)
    q = q.round().nan_to_num(0) if dtype is torch.int8 else q
    q = q.clamp(-largest, largest).to(dtype).view(x.shape)
    return q, scale.unsqueeze(-1) if block is None else scale


@hookimpl
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[Sample] | None:
    """Gives the derived samples blocks that divide a row, and rows that have a number."""
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import TensorArg, strategy

    drawn = strategy(op)

    def has_numbers(sample: Sample) -> bool:
        x = sample.args[0]
        assert isinstance(x, TensorArg)
        return x.shape[-1] > 0

    def with_block(sample: Sample) -> SearchStrategy[Sample]:
        x, dtype, *block = sample.args
        size = x.shape[-1]
        divisors = [d for d in (1, 2, 3, 5, 8, 16, 32, 64, size) if size % d == 0]
        chosen = st.tuples(*[st.sampled_from([None, *divisors]) for _ in block])
        return chosen.map(lambda block: replace(sample, args=(x, dtype, *block)))

    return None if drawn is None else drawn.filter(has_numbers).flatmap(with_block)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns rows for each family of kernels: parts of a warp, blocks, rows read again."""
    from cuda_ops.testing.samples import Sample, TensorArg

    rows = ((300, 24), (70, 1000), (40, 4096), (3, 16_384), (2, 40_000), (5, 4099))
    return [
        Sample((TensorArg(shape, x), narrow, block))
        for x, narrow in ((torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.int8))
        for shape, block in (*((shape, None) for shape in rows), ((40, 4096), 128))
    ]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(torch_quantize)


#: Rows, their length, the block and why.
_POINTS: tuple[tuple[int, int, int | None, str], ...] = (
    (1, 4096, None, "one token"),
    (64, 4096, None, "a small batch of tokens"),
    (1 << 14, 4096, None, "hidden states of many tokens"),
    (1 << 14, 4096, 128, "the same in the blocks of DeepSeek-V3"),
    (1 << 13, 8192, None, "hidden states of a larger model"),
    (1 << 12, 14_336, None, "what a feed-forward layer takes back"),
    (1 << 14, 4096, 32, "small blocks"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    half, wide, narrow = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    return [
        *(_case(*point, half, narrow) for point in _POINTS),
        *(_case(*point, half, torch.int8) for point in _POINTS[:5]),
        *(_case(*point, wide, narrow) for point in _POINTS[2:4]),
    ]


def _case(
    rows: int, n: int, block: int | None, reason: str, dtype: torch.dtype, narrow: torch.dtype
) -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import maker

    names = [str(d).removeprefix("torch.") for d in (dtype, narrow)]
    return BenchmarkCase(
        f"{rows}x{n} {' to '.join(names)}" + (f", blocks of {block}" if block else ""),
        maker((((rows, n), dtype), narrow, block)),
        bytes=rows * n * (dtype.itemsize + 1) + 4 * rows * (n // (block or n)),
        reason=reason,
        dtype=dtype,
        arithmetic="fp32",
    )
