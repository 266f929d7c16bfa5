"""What ``rotary_embedding`` and ``rotary_embedding_`` share: the formula, and cases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.spec import BenchmarkCase, OpSpec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample


def samples(op: OpSpec) -> SearchStrategy[Sample] | None:
    """Gives the derived samples no tables in float64 beside an x in another dtype: large numbers,
    which sines are not, would become infinite.
    """
    from cuda_ops.testing.samples import strategy

    drawn = strategy(op)

    def fitting(sample: Sample) -> Sample:
        x, *tables, interleaved = sample.args
        narrow = x.dtype is not torch.float64
        tables = [
            replace(table, dtype=torch.float32)
            if narrow and table.dtype is torch.float64
            else table
            for table in tables
        ]
        return replace(sample, args=(x, *tables, interleaved))

    return None if drawn is None else drawn.map(fitting)


def kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns heads of whole vectors, turned as a whole and in part, and of single elements."""
    from cuda_ops.testing.samples import Sample, TensorArg

    half, wide = torch.bfloat16, torch.float32
    return [
        Sample((
            TensorArg((2, 70, heads, dim), dtype),
            TensorArg((70, pairs), table),
            TensorArg((70, pairs), table),
            interleaved,
        ))
        for dtype, table in ((half, half), (half, wide))
        for heads, dim, pairs in ((32, 128, 64), (3, 96, 16), (3, 96, 12), (5, 50, 20))
        for interleaved in (False, True)
    ]  # fmt: skip


def composed(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Computes the formula with operators of PyTorch."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    parts = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    rest = rest.expand(*joined.shape[:-1], -1)
    return torch.cat((joined.to(x.dtype), rest), -1)


#: Batch, tokens, heads, elements of a head and of those turned, and why.
_POINTS = (
    (64, 1, 40, 128, 128, "one token of each of 64 sequences"),
    (1, 128, 40, 128, 128, "a short prompt: queries and keys of Llama 3 8B"),
    (4, 4096, 40, 128, 128, "queries and keys of Llama 3 8B"),
    (2, 4096, 72, 128, 128, "queries and keys of Llama 3 70B"),
    (4, 4096, 64, 96, 24, "a quarter of each head, as GPT-NeoX 20B"),
    (8, 8192, 1, 64, 64, "one shared head, as DeepSeek-V3"),
)


def cases(op: OpSpec) -> list[BenchmarkCase]:
    """Returns cases with tables in the dtype of x, and one with tables in float32."""
    half, wide = torch.bfloat16, torch.float32
    return [
        *(_case(op, *point, half) for point in _POINTS),
        _case(op, *_POINTS[2], half, table=wide),
        _case(op, *_POINTS[2], half, interleaved=True),
        _case(op, *_POINTS[2], wide),
    ]


def _case(
    op: OpSpec,
    batch: int,
    tokens: int,
    heads: int,
    dim: int,
    turned: int,
    reason: str,
    dtype: torch.dtype,
    interleaved: bool = False,
    table: torch.dtype | None = None,
) -> BenchmarkCase:
    label = f"{batch}x{tokens}x{heads}x{dim} {str(dtype).removeprefix('torch.')}"
    label += f", {turned} turned" if turned < dim else ""
    label += ", interleaved" if interleaved else ""
    label += ", tables in float32" if table is not None else ""
    own = table or dtype

    def make_inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(batch, tokens, heads, dim, device=device, dtype=dtype)
        angle = torch.randn(tokens, turned // 2, device=device)
        return x, angle.cos().to(own), angle.sin().to(own), interleaved

    moved = 2 * batch * tokens * heads * (turned if op.written else dim) * dtype.itemsize
    return BenchmarkCase(
        label,
        make_inputs,
        bytes=moved + tokens * turned * own.itemsize,
        reason=reason,
        dtype=dtype,
        arithmetic="fp32",
    )
