"""``normalize_volume``: an output dtype and rules for arguments that no signature line says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from cuda_ops import shapes
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec
from cuda_ops.testing.samples import LAYOUTS, VALUES, Sample, TensorArg

_DIVISORS = (1e-30, 1e30)
_SIZES = (1, 2, 3, 5, 8, 16, 33)


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any] | None:
    def fake(
        x: torch.Tensor,
        *,
        maximum: float | None = None,
        mean: float | None = None,
        std: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        shapes.check_arguments(op, [x])
        _check(op, maximum, mean, std, dtype)
        return x.new_empty(x.shape, dtype=dtype or torch.float32)

    return fake


def _check(
    op: OpSpec,
    maximum: float | None,
    mean: float | None,
    std: float | None,
    dtype: torch.dtype | None,
) -> None:
    """Refuse what the binding refuses, in the same words."""

    def refuse(argument: str, expected: str, actual: str) -> None:
        raise RuntimeError(
            f"{op.qualname}: argument '{argument}': expected {expected}, got {actual}"
        )

    if dtype not in (None, torch.float32, torch.float16):
        refuse("dtype", "float32 or float16", "another dtype")
    if maximum is not None and (mean is not None or std is not None):
        refuse("maximum", "None beside mean and std", "both")
    if mean is not None and std is None:
        refuse("std", "a number beside mean", "None")
    if std is not None and mean is None:
        refuse("mean", "a number beside std", "None")
    least, most = _DIVISORS
    for argument, value in (("maximum", maximum), ("std", std)):
        if value is not None and not least <= value <= most:
            refuse(argument, "a number from 1e-30 to 1e30", f"{value:f}")
    if mean is not None and not abs(mean) <= most:
        refuse("mean", "a number from -1e30 to 1e30", f"{mean:f}")


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return by_own_statistics


def by_own_statistics(x: torch.Tensor) -> torch.Tensor:
    """Each volume with mean 0 and population standard deviation 1; zeros where it is constant."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.float64)
    wide = x.to(torch.float64)
    dims = (-3, -2, -1)
    std = wide.std(dims, correction=0, keepdim=True)
    constant = wide.amax(dims, keepdim=True) == wide.amin(dims, keepdim=True)
    return torch.where(constant, 0.0, (wide - wide.mean(dims, keepdim=True)) / std)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any] | None:
    """Volumes by their own statistics; what keyword arguments do is no sample's matter."""
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
    return st.builds(Sample, st.tuples(tensors), st.sampled_from(VALUES), st.integers(0, 2**16))


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    return [_case(side) for side in (64, 128, 256, 512)]


def _case(side: int) -> BenchmarkCase:
    def inputs(device: torch.device) -> tuple[torch.Tensor]:
        shape = (side, side, side)
        return (torch.randint(0, 4096, shape, device=device, dtype=torch.int32).to(torch.uint16),)

    moved = side**3 * (2 + 4)  # uint16 once, float32 once
    return BenchmarkCase(f"{side}^3 uint16", inputs, bytes=moved, peers=torch_peers(composed))


def composed(x: torch.Tensor) -> torch.Tensor:
    """The same in PyTorch, for one volume."""
    wide = x.to(torch.float32)
    return (wide - wide.mean()) / wide.std(correction=0)
