"""``dequantize_int4``: how many scales belong to a row, and what to compare and time it with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive import rules
from cuda_ops.derive.checks import refuse
from cuda_ops.derive.sizes import shape_name
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
        q: torch.Tensor, scale: torch.Tensor, block: int, zero_point: torch.Tensor | None = None
    ) -> Any:
        made = derived(q, scale, block, zero_point)
        numbers = 2 * q.shape[-1]
        if block < 1 or numbers % block != 0:
            expected = f"a divisor of {numbers}, the numbers in a row of 'q'"
            refuse(op, "block", expected, str(block))
        if scale.shape[-1] != numbers // block:
            expected = f"dim 'g' of (..., g) to be {numbers // block}, one for each {block} of "
            refuse(op, "scale", f"{expected}{numbers} numbers", f"shape {shape_name(scale.shape)}")
        return made

    return fake


# --- testing and timing --------------------------------------------------------------------


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return torch_dequantize


def torch_dequantize(
    q: torch.Tensor, scale: torch.Tensor, block: int, zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """Dequantizes as model code does, in the dtype of the scales."""
    codes = torch.stack([q & 15, q >> 4], -1).flatten(-2)
    if zero_point is None:
        codes = (codes ^ 8).to(torch.int8) - 8
    values = codes.unflatten(-1, (scale.shape[-1], block)).to(scale.dtype)
    if zero_point is not None:
        values = values - zero_point.unsqueeze(-1)
    numbers: torch.Tensor = values * scale.unsqueeze(-1)
    return numbers.flatten(-2)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[Sample] | None:
    """Gives the derived samples as many scales as blocks."""
    from cuda_ops.testing.samples import TensorArg, strategy

    drawn = strategy(op)

    def has_numbers(sample: Sample) -> bool:
        return all(math.prod(arg.shape[-1:]) > 0 for arg in sample.tensors)

    def fitting(sample: Sample) -> Sample:
        q, scale, block, *zero_point = sample.args
        assert isinstance(q, TensorArg)
        numbers = 2 * q.shape[-1]
        divisors = [d for d in (2, 1, 8, 3, 16, 32, numbers) if numbers % d == 0]
        chosen = divisors[block % len(divisors)]

        def with_scales(arg: TensorArg | None) -> TensorArg | None:
            shape = (*arg.shape[:-1], numbers // chosen) if arg is not None else ()
            return None if arg is None else replace(arg, shape=shape)

        return replace(sample, args=(q, with_scales(scale), chosen, *map(with_scales, zero_point)))

    return None if drawn is None else drawn.filter(has_numbers).map(fitting)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns blocks of whole packs, and others."""
    from cuda_ops.testing.samples import Sample, TensorArg

    def sample(rows: int, numbers: int, block: int, dtype: torch.dtype, zero: bool) -> Sample:
        scales = TensorArg((rows, numbers // block), dtype)
        q = TensorArg((rows, numbers // 2), torch.uint8)
        return Sample((q, scales, block, scales if zero else None))

    return [
        sample(40, 4096, block, dtype, zero)
        for dtype in (torch.bfloat16, torch.float32)
        for block, zero in ((128, False), (128, True), (2, False), (1, True))
    ]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(torch_dequantize)


#: Rows, their numbers, the block and why.
_POINTS = (
    (4096, 4096, 128, "a projection of a small model"),
    (14_336, 4096, 128, "a feed-forward matrix"),
    (28_672, 8192, 128, "the same of a larger model"),
    (14_336, 4096, 32, "small blocks"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    half, wide = torch.bfloat16, torch.float32
    return [
        *(_case(*point, half, zero) for zero in (False, True) for point in _POINTS),
        _case(*_POINTS[1], wide, zero=False),
    ]


def _case(
    rows: int, numbers: int, block: int, reason: str, dtype: torch.dtype, zero: bool
) -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import maker

    scales, zeros = ((rows, numbers // block), dtype), " with zero points" if zero else ""
    q = ((rows, numbers // 2), torch.uint8)
    of_blocks = (1 + zero) * (numbers // block)
    return BenchmarkCase(
        f"{rows}x{numbers} {str(dtype).removeprefix('torch.')}, blocks of {block}{zeros}",
        maker((q, scales, block, *((scales,) if zero else ()))),
        bytes=rows * (numbers // 2 + (numbers + of_blocks) * dtype.itemsize),
        reason=reason,
        dtype=dtype,
        arithmetic="fp32",
    )
