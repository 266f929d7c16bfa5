"""``bitonic_topk``: the dim is an argument, which a signature line cannot say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _along_dim, _sorting
from cuda_ops.spec import Autograd, BenchmarkCase, OpSpec, Peer, ShardingRule

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample

_DIM_AT = 2


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    def fake(
        x: torch.Tensor,
        k: int,
        dim: int = -1,
        largest: bool = True,
        sorted: bool = True,  # noqa: A002 (torch.topk's name)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dim = _along_dim.checked_dim(op, x, dim)
        length = x.shape[dim] if x.dim() else 1

        def message() -> str:
            expected = f"expected a number from 0 to the size of the dim, {length}"
            return f"{op.qualname}: argument 'k': {expected}, got {k}"

        torch._check(k >= 0, message)
        torch._check(k <= length, message)
        return _sorting.empty(x, dim, k, x.dtype), _sorting.empty(x, dim, k, torch.int64)

    return fake


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd:
    return _sorting.autograd(_DIM_AT)


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any]:
    return _along_dim.vmap(op, _DIM_AT)


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]]:
    return _along_dim.sharding(op, _DIM_AT)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return first_of_stable_sort


def first_of_stable_sort(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, in_order: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what ``torch.topk`` does, and takes the first of equal elements."""
    results = torch.sort(x, stable=True, dim=dim, descending=largest)
    if not x.dim():  # its one element, for k = 0 too, as torch.topk returns
        return results[0], results[1]
    return results[0].narrow(dim, 0, k), results[1].narrow(dim, 0, k)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample
    from cuda_ops.testing.values import VALUES

    def sample(drawn: tuple[Any, int], wanted: int, values: Any, seed: int, *flags: bool) -> Sample:
        tensor, dim = drawn
        length = tensor.shape[dim] if tensor.shape else 1
        return Sample((tensor, min(wanted, length), dim, *flags), values, seed)

    wanted = st.sampled_from((1, 2, 3, 8, 31, 32, 33, 64, 65, 300, 0))
    flags = st.booleans(), st.booleans()
    seeds = st.integers(0, 2**16)
    return st.builds(sample, _along_dim.tensors(op), wanted, st.sampled_from(VALUES), seeds, *flags)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns rows of one chunk and of several, for each number of elements that warps keep; for
    blocks that select by a sample; and some that are all sorted.
    """
    from cuda_ops.testing.samples import Sample, TensorArg

    dtypes = torch.float32, torch.bfloat16, torch.int64
    sizes = (1900, 7), (9000, 64), (5000, 300), (70_000, 100), (2000, 1500)
    return [Sample((TensorArg((2, n), dtype), k)) for dtype in dtypes for n, k in sizes]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import EAGER

    # torch.compile calls the same kernel. It may take other indices of equal elements.
    return {EAGER: Peer(lambda: torch_topk, compared=1)}


#: Rows, their length, and k: routing, sampling, retrieval.
_POINTS = (
    (1 << 16, 64, 8), (1 << 16, 128, 8), (1 << 14, 1024, 1), (1 << 14, 1024, 8),
    (1 << 14, 1024, 64), (1 << 12, 4096, 32), (1 << 10, 32768, 64), (64, 131072, 50),
    (1, 1 << 20, 64), (1, 1 << 24, 16), (1, 1 << 27, 64),
    (4096, 4096, 256), (1024, 32768, 512), (1024, 32768, 2048), (64, 131072, 256),
    (64, 131072, 512), (64, 131072, 2048), (64, 131072, 16384), (64, 131072, 65536),
    (1024, 131072, 8192), (1, 1 << 20, 512), (1, 1 << 24, 2048),
)  # fmt: skip
#: Keys in another order than random, and why: for a warp that queues, and a block that samples.
_ORDERS = {
    "ascending": "each key is better than all before it",
    "descending": "the best come first",
    "equal": "the first indices are wanted",
    "few values": "sixteen of them, so that the last of the first k has many equals",
    "clustered": "around one value, but for one in a hundred that is far away",
}
_ORDERED_POINTS = ((1 << 10, 32768, 64), (64, 131072, 512))


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    single = torch.float32
    return [
        *(_case(*point, dtype) for dtype in (single, torch.bfloat16) for point in _POINTS),
        *(_case(*point, single, keys) for keys in _ORDERS for point in _ORDERED_POINTS),
    ]


def _case(count: int, n: int, k: int, dtype: torch.dtype, keys: str = "") -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import random_tensor

    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = random_tensor((count, n), dtype, device)
        if keys in ("ascending", "descending"):
            x = torch.sort(x, descending=keys == "descending").values
        elif keys == "equal":
            x = torch.ones_like(x)
        elif keys == "few values":
            x = torch.randint(0, 16, (count, n), device=device).to(dtype)
        elif keys == "clustered":
            far = torch.randint(0, 100, (count, n), device=device) == 0
            x = torch.where(far, 1e4 * x, 1 + 1e-4 * x)
        return x, k

    return BenchmarkCase(
        f"{count}x{n}, {k} {str(dtype).removeprefix('torch.')}" + (f", {keys}" if keys else ""),
        inputs,
        bytes=count * (n * dtype.itemsize + k * (dtype.itemsize + 8)),
        reason=_ORDERS.get(keys, ""),
        group="other keys" if keys else "random keys",
        dtype=dtype,
    )


def torch_topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(x, k)
    return values, indices
