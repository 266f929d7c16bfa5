"""``bitonic_sort``: the dim is an argument, which a signature line cannot say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _along_dim, _sorting
from cuda_ops.spec import Autograd, BenchmarkCase, OpSpec, Peer, ShardingRule

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    def fake(
        x: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dim = _along_dim.checked_dim(op, x, dim)
        length = x.shape[dim] if x.dim() else 1
        return _sorting.empty(x, dim, length, x.dtype), _sorting.empty(x, dim, length, torch.int64)

    return fake


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd:
    return _sorting.autograd(dim_at=1)


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any]:
    return _along_dim.vmap(op, dim_at=1)


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]]:
    return _along_dim.sharding(op, dim_at=1)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return torch_stable_sort


def torch_stable_sort(
    x: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts stably even if that is not asked for, as the operator does."""
    values, indices = torch.sort(x, stable=True, dim=dim, descending=descending)
    return values, indices


def torch_sort(
    x: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts as users call it: without asking for a stable order, whatever ``stable`` says."""
    values, indices = torch.sort(x, dim=dim, descending=descending)
    return values, indices


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample
    from cuda_ops.testing.values import VALUES

    def sample(drawn: tuple[Any, int], values: Any, seed: int, *flags: bool) -> Sample:
        return Sample((*drawn, *flags), values, seed)

    flags = st.booleans(), st.booleans()
    seeds = st.integers(0, 2**16)
    return st.builds(sample, _along_dim.tensors(op), st.sampled_from(VALUES), seeds, *flags)


#: Rows and their length for blocks, clusters and radix sorts; tests/test_sorting_kernels.py
#: compares them with the plan of an H200. Launches for each step of 8-byte keys are missing: they
#: start at 2^26 elements, too many for a sanitizer.
_KERNELS = (
    ((3, 3000), torch.float32), ((3, 3000), torch.int64), ((3, 3000), torch.bfloat16),
    ((17, 16500), torch.float32), ((17, 16500), torch.uint8),
    ((2, 20000), torch.float32), ((1, 30000), torch.int64), ((2, 20000), torch.uint8),
    ((9, 9000), torch.float32), ((9, 9000), torch.bfloat16),
    ((1, 140_000), torch.float32), ((1, 140_000), torch.bfloat16), ((1, 140_000), torch.uint8),
    ((1, 70_000), torch.int64),
)  # fmt: skip


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    from cuda_ops.testing.samples import Sample, TensorArg

    return [Sample((TensorArg(*kernel),)) for kernel in _KERNELS]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import EAGER

    # torch.compile calls the same kernels. The default may take other indices of equal elements.
    return {
        EAGER: Peer(lambda: torch_sort, compared=1),
        f"{EAGER} stable": torch_stable_sort,
    }


#: Rows and their length, from short to long, for each way of sorting.
_POINTS = (
    (1 << 18, 16), (1 << 16, 64), (1 << 16, 128), (1 << 14, 256), (1 << 14, 1000), (1 << 14, 1024),
    (1 << 13, 2048), (1 << 12, 4096), (1 << 11, 8192), (1 << 10, 16384), (1 << 9, 32768),
    (256, 65536), (1, 1 << 16), (1, 1 << 20), (1, 1 << 24), (1, 1 << 27),
)  # fmt: skip
#: The dtypes that are measured at all points, and those that are at a few.
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
_MORE_DTYPES = (torch.float16, torch.float64, torch.int32)
_FEW_POINTS = ((1 << 16, 64), (1 << 14, 1024), (1 << 10, 16384), (1, 1 << 24))
#: A dim that is not the innermost: shape and dim.
_STRIDED = (((1024, 1 << 14), 0), ((64, 4096, 64), 1), ((1 << 20, 8), 0))
#: Keys in another order than random, and why.
_ORDERS = {
    "clustered": "keys around eight centres, whose first bits are equal",
    "few values": "sixteen values, so that nearly all keys are equal to others",
    "ascending": "sorted already",
    "descending keys": "sorted the other way round",
}


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    single = torch.float32
    return [
        *(_case(point, dtype) for dtype in _DTYPES for point in _POINTS),
        *(_case(point, dtype) for dtype in _MORE_DTYPES for point in _FEW_POINTS),
        *(_case(point, single, descending=True) for point in _FEW_POINTS[1:]),
        *(_case(shape, single, dim) for shape, dim in _STRIDED),
        _case(_STRIDED[0][0], torch.bfloat16, _STRIDED[0][1]),
        *(_case(point, single, keys=keys) for keys in _ORDERS for point in _FEW_POINTS[1::2]),
    ]


def _case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dim: int = -1,
    descending: bool = False,
    keys: str = "",
) -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import random_tensor

    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = random_tensor(shape, dtype, device)
        if keys == "clustered":
            x = x / 1024 + torch.randint(0, 8, shape, device=device)
        elif keys == "few values":
            x = torch.randint(0, 16, shape, device=device).to(dtype)
        elif keys:
            x = torch.sort(x, descending=keys == "descending keys").values
        return x, dim, descending, False

    numel = math.prod(shape)
    more = (
        *((f"along dim {dim}",) if dim >= 0 else ()),
        *(("descending",) if descending else ()),
        *((keys,) if keys else ()),
    )
    one_row = numel == shape[dim]
    return BenchmarkCase(
        ", ".join(("x".join(map(str, shape)) + f" {str(dtype).removeprefix('torch.')}", *more)),
        inputs,
        bytes=numel * (2 * dtype.itemsize + 8),
        reason=_ORDERS.get(keys, ""),
        group=("other keys and dims" if more else "one row" if one_row else "rows"),
        dtype=dtype,
    )
