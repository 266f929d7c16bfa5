"""``normalize_volume``: a reference, samples of voxels, and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample

_SIZES = (1, 2, 3, 5, 8, 16, 33)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return normalized


def normalized(
    x: torch.Tensor,
    maximum: float | None = None,
    *,
    mean: float | None = None,
    std: float | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes the result in float64, whatever ``dtype`` says; zeros for a constant volume."""
    wide = x.to(torch.float64)
    if maximum is not None:
        return wide / maximum
    if mean is not None and std is not None:
        return (wide - mean) / std
    if x.numel() == 0:
        return wide
    dims = (-3, -2, -1)
    spread = wide.std(dims, correction=0, keepdim=True)
    constant = wide.amax(dims, keepdim=True) == wide.amin(dims, keepdim=True)
    return torch.where(constant, 0.0, (wide - wide.mean(dims, keepdim=True)) / spread)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any] | None:
    """Draws volumes to normalize by their own statistics, by a maximum, or by a mean and a spread:
    the operator refuses other combinations.
    """
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import LAYOUTS, Sample, TensorArg
    from cuda_ops.testing.values import VALUES

    sizes = st.sampled_from(_SIZES)
    batch = st.lists(st.sampled_from((0, 1, 2, 3)), max_size=2)
    layouts = [layout for layout in LAYOUTS if layout != "channels_last"]
    tensors = st.builds(
        lambda batch, volume, dtype, layout: TensorArg((*batch, *volume), dtype, layout),
        batch,
        st.tuples(sizes, sizes, sizes).filter(lambda s: s[0] * s[1] * s[2] <= 400),
        st.sampled_from(op.dtypes),
        st.sampled_from(layouts),
    )
    scalings = st.sampled_from(((None, None, None), (4095.0, None, None), (None, 100.5, 12.25)))
    args = st.builds(
        lambda x, scaling, dtype: (x, *scaling, dtype),
        tensors,
        scalings,
        st.sampled_from((None, *op.dtypes_of["dtype"])),
    )
    return st.builds(Sample, args, st.sampled_from(VALUES), st.integers(0, 2**16))


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns volumes whose blocks wait for each other, of whole vectors and of others."""
    from cuda_ops.testing.samples import Sample, TensorArg

    sides = (32, 32, 64), (31, 33, 65)
    return [Sample((TensorArg((2, *side), dtype),)) for dtype in op.dtypes for side in sides]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(composed)


def composed(
    x: torch.Tensor, maximum: float | None = None, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Does the same in PyTorch, by a maximum or for one volume by its own statistics."""
    wide = x.to(torch.float32)
    if maximum is not None:
        return (wide / maximum).to(dtype)
    return ((wide - wide.mean()) / wide.std(correction=0)).to(dtype)


#: The side of the cube, and why.
_SIDES = (
    (64, "a patch: the launch is much of the cost"),
    (128, "a small scan, inside any cache"),
    (256, "a scan that just fits a cache"),
    (512, "a scan beyond the cache"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    cases = [
        _case(*side, torch.uint16, torch.float32, how)
        for how in ({}, {"maximum": 65535.0})
        for side in _SIDES
    ]
    side = (256, "the fewest bytes a voxel")
    return [*cases, _case(*side, torch.uint8, torch.float16, {"maximum": 255.0})]


def _case(
    side: int, reason: str, voxel: torch.dtype, result: torch.dtype, how: dict[str, float]
) -> BenchmarkCase:
    def inputs(device: torch.device) -> tuple[torch.Tensor]:
        most = min(4096, torch.iinfo(voxel).max + 1)  # 12 bits, as scanners have
        return (torch.randint(0, most, (side,) * 3, device=device, dtype=torch.int32).to(voxel),)

    names = [str(dtype).removeprefix("torch.") for dtype in (voxel, result)]
    return BenchmarkCase(
        f"{side}^3 {' to '.join(names)}, by {'maximum' if how else 'own statistics'}",
        inputs,
        bytes=side**3 * (voxel.itemsize + result.itemsize),
        keywords={**how, "dtype": result},
        reason=reason,
        dtype=voxel,
    )
