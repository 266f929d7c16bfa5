"""``moe_send_``: no signature line describes lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive.checks import check_arguments, check_equal, dtype_name, refusal, refuse
from cuda_ops.derive.sizes import Dims, shape_name
from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops._moe_checks import FLOATING
from cuda_ops.spec import BenchmarkCase, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Layout, Sample

Tensors = Sequence[torch.Tensor]
#: ``kMostRanks`` of ``moe_send.h``.
_MOST_RANKS = 16
#: Both are contiguous, and one starts where no vector is aligned.
_WRITTEN: tuple[Layout, ...] = ("contiguous", "offset")


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    def fake(
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        firsts: Sequence[int],
        xs: Tensors,
        chosen: Tensors,
        scales: Tensors,
    ) -> None:
        check_arguments(op, (x, experts, weights, firsts, xs, chosen, scales))
        for name, tensor in (("x", x), ("experts", experts)):
            if tensor.dim() != 2:
                refuse(op, name, "2 dims", f"shape {shape_name(tensor.shape)}")
        _check_shape(op, "experts", experts, (x.shape[0], experts.shape[1]))
        _check_shape(op, "weights", weights, experts.shape)
        if not 1 <= len(firsts) <= _MOST_RANKS:
            refuse(op, "firsts", f"1 to {_MOST_RANKS} numbers", f"{len(firsts)}")
        _check_copies(op, "xs", xs, "x", x, len(firsts))
        _check_copies(op, "chosen", chosen, "experts", experts, len(firsts))
        _check_copies(op, "scales", scales, "weights", weights, len(firsts))

    return fake


def _check_shape(op: OpSpec, name: str, tensor: torch.Tensor, shape: Dims, like: str = "") -> None:
    expected, actual = f"shape {shape_name(shape)}{like}", f"shape {shape_name(tensor.shape)}"
    if tensor.dim() != len(shape):
        refuse(op, name, expected, actual)
    wrong = partial(refusal, op, name, expected, actual)
    for size, other in zip(tensor.shape, shape, strict=True):
        check_equal(size, other, wrong)


def _check_copies(
    op: OpSpec, name: str, copies: Tensors, original_name: str, original: torch.Tensor, ranks: int
) -> None:
    """Refuses what ``part_of`` of ``moe_send_.cpp`` refuses."""
    if len(copies) != ranks:
        refuse(op, name, f"as many tensors as 'firsts' has numbers, {ranks}", f"{len(copies)}")
    like = f" like '{original_name}'"
    for r, copy in enumerate(copies):
        if copy.dtype != original.dtype:
            expected = f"dtype {dtype_name(original.dtype)}{like}"
            refuse(op, f"{name}[{r}]", expected, dtype_name(copy.dtype))
        _check_shape(op, f"{name}[{r}]", copy, original.shape, like)
        if not copy.is_contiguous():
            refuse(op, f"{name}[{r}]", "a contiguous tensor", "one that is not")


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return copied


def copied(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    firsts: Sequence[int],
    xs: Tensors,
    chosen: Tensors,
    scales: Tensors,
) -> None:
    """Copies all of it to one rank after the other."""
    for r, first in enumerate(firsts):
        xs[r].copy_(x)
        torch.sub(experts, first, out=chosen[r])
        scales[r].copy_(weights)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Sample]:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import LAYOUTS
    from cuda_ops.testing.values import VALUES

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        tokens = draw(st.sampled_from((1, 2, 3, 7, 16, 0)))
        hidden = draw(st.sampled_from((1, 3, 8, 16, 33, 64, 0)))
        top_k = draw(st.sampled_from((1, 2, 3, 8)))
        firsts = draw(st.lists(st.sampled_from((0, 3, 64, -5)), min_size=1, max_size=3))
        dtype, of_weights = (draw(st.sampled_from(FLOATING)) for _ in range(2))
        layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(3)]
        written = draw(st.sampled_from(_WRITTEN))
        return _sample(
            (tokens, hidden, top_k), firsts, dtype, of_weights, layouts, written,
            values=draw(st.sampled_from(VALUES)), seed=draw(st.integers(0, 2**16)),
        )  # fmt: skip

    return drawn()


def _sample(
    sizes: tuple[int, int, int],
    firsts: Sequence[int],
    dtype: torch.dtype,
    of_weights: torch.dtype = torch.float32,
    layouts: Sequence[Layout] = ("contiguous",) * 3,
    written: Layout = "contiguous",
    **others: Any,
) -> Sample:
    from cuda_ops.testing.samples import Sample, TensorArg

    tokens, hidden, top_k = sizes
    kinds = [((tokens, hidden), dtype), ((tokens, top_k), torch.int64),
             ((tokens, top_k), of_weights)]  # fmt: skip
    read = [TensorArg(*kind, layout) for kind, layout in zip(kinds, layouts, strict=True)]
    copies = [[TensorArg(*kind, written) for _ in firsts] for kind in kinds]
    return Sample((*read, list(firsts), *copies), **others)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns accesses of each width, no tokens, few, and many: four loads a thread, and more
    chunks than blocks at a time.
    """
    half, single = torch.bfloat16, torch.float32
    samples = [
        _sample((tokens, hidden, top_k), [0, 8], half, half)
        for tokens in (64, 63, 0)
        for hidden, top_k in ((2048, 8), (2052, 4), (2050, 2), (2049, 3))
    ]
    unaligned = [_sample((63, 2048, 8), [8, 0, 16], dtype, written="offset")
                 for dtype in (half, single)]  # fmt: skip
    return [*samples, *unaligned, _sample((3000, 2048, 8), [0], half)]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(foreach_copied)


def foreach_copied(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    firsts: Sequence[int],
    xs: Tensors,
    chosen: Tensors,
    scales: Tensors,
) -> None:
    """Copies by torch's operators for lists, one of each dtype."""
    ranks = len(firsts)
    torch._foreach_copy_(list(xs), [x] * ranks)
    torch._foreach_copy_(list(chosen), [experts - first for first in firsts])
    torch._foreach_copy_(list(scales), [weights] * ranks)


#: Tokens, elements of each, choices, ranks, and why.
_POINTS = (
    (64, 2048, 8, 8, "a step of decoding Qwen3 on eight ranks"),
    (8192, 2048, 8, 2, "prompts of Qwen3 on two ranks"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    return [_case(*point) for point in _POINTS]


def _case(tokens: int, hidden: int, top_k: int, ranks: int, reason: str) -> BenchmarkCase:
    """Ranks are places on the same GPU: what the kernel does, without the links."""

    def make_inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
        experts = torch.randint(16 * ranks, (tokens, top_k), device=device)
        weights = torch.rand(tokens, top_k, device=device)
        copies = [[torch.zeros_like(one) for _ in range(ranks)] for one in (x, experts, weights)]
        return x, experts, weights, [16 * r for r in range(ranks)], *copies

    return BenchmarkCase(
        f"{tokens}x{hidden} bfloat16, k {top_k}, to {ranks} ranks",
        make_inputs,
        bytes=(1 + ranks) * tokens * (2 * hidden + (8 + 4) * top_k),
        reason=reason,
        dtype=torch.bfloat16,
    )
