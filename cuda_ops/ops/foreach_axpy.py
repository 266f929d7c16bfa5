"""``foreach_axpy`` and ``foreach_axpy_``: no signature line describes lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive.arguments import bind
from cuda_ops.derive.checks import dtype_name, dtypes_text, refuse
from cuda_ops.derive.layout import is_dense
from cuda_ops.derive.sizes import is_true, shape_name
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd, BenchmarkCase, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample

Tensors = Sequence[torch.Tensor]
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    def fake(xs: Tensors, ys: Tensors, alpha: float = 1.0) -> list[torch.Tensor] | None:
        _check_pairs(op, xs, ys)
        return None if op.written else [_empty(x, y) for x, y in zip(xs, ys, strict=True)]

    return fake


def _check_pairs(op: OpSpec, xs: Tensors, ys: Tensors) -> None:
    """Refuses what ``check_pairs`` of ``foreach_binding.h`` refuses."""
    _check_counts(op, xs, ys)
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if x.dtype not in _FLOATING:
            refuse(op, f"xs[{i}]", f"dtype {dtypes_text(_FLOATING)}", dtype_name(x.dtype))
        if y.dtype != x.dtype:
            expected = f"dtype {dtype_name(x.dtype)} like 'xs[{i}]'"
            refuse(op, f"ys[{i}]", expected, dtype_name(y.dtype))
        alike = len(x.shape) == len(y.shape) and all(
            is_true(a == b) for a, b in zip(x.shape, y.shape, strict=True)
        )
        if not alike:
            expected = f"shape {shape_name(x.shape)} like 'xs[{i}]'"
            refuse(op, f"ys[{i}]", expected, f"shape {shape_name(y.shape)}")


def _check_counts(op: OpSpec, xs: Tensors, ys: Tensors) -> None:
    if len(xs) != len(ys):
        refuse(op, "ys", f"as many tensors as in 'xs', which has {len(xs)}", f"{len(ys)}")


def _empty(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    strides = zip(x.stride(), y.stride(), strict=True)
    if is_dense(x) and all(is_true(a == b) for a, b in strides):
        return x.new_empty_strided(x.shape, x.stride())
    return x.new_empty(x.shape)


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    if op.written:
        return None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.alpha = inputs[2]

    def backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        given = [grad for grad in grads if grad is not None]
        if not given or torch._C._are_functorch_transforms_active():  # torch batches no lists
            scaled = iter([grad * ctx.alpha for grad in given])
        else:
            scaled = iter(torch._foreach_mul(given, ctx.alpha))
        of_xs = [None if grad is None else next(scaled) for grad in grads]
        # Where there are lists, torch wants none for an alpha that is the default.
        return (of_xs, list(grads), None)[: len(ctx.needs_input_grad)]

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any]:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        xs, ys, alpha = bind(op, args, kwargs)
        _check_counts(op, xs, ys)

        def front(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None:
                return tensor.expand(info.batch_size, *tensor.shape)
            return tensor.movedim(dim, 0)

        dims = [
            given if isinstance(given, (list, tuple)) else [given] * len(listed)
            for given, listed in zip(in_dims, (xs, ys), strict=False)
        ]
        for i, (dim_x, dim_y) in enumerate(zip(*dims, strict=True)):
            if op.written and dim_y is None and dim_x is not None:
                expected = (
                    f"a tensor that torch.vmap maps like 'xs[{i}]', as the operator writes it"
                )
                refuse(op, f"ys[{i}]", expected, "one that it does not map")
        pairs = [
            (x, y) if dim_x is dim_y is None else (front(x, dim_x), front(y, dim_y))
            for x, y, dim_x, dim_y in zip(xs, ys, *dims, strict=True)
        ]
        results = op.function([x for x, _ in pairs], [y for _, y in pairs], alpha)
        if results is None:
            return None, None
        outs = [None if dim_x is dim_y is None else 0 for dim_x, dim_y in zip(*dims, strict=True)]
        return results, outs

    return rule


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    return torch_foreach_add_ if op.written else torch_foreach_add


def torch_foreach_add(xs: Tensors, ys: Tensors, alpha: float = 1.0) -> list[torch.Tensor]:
    return list(torch._foreach_add(list(ys), list(xs), alpha=alpha))


def torch_foreach_add_(xs: Tensors, ys: Tensors, alpha: float = 1.0) -> None:
    torch._foreach_add_(list(ys), list(xs), alpha=alpha)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import LAYOUTS, OVERLAPPING, Sample, TensorArg
    from cuda_ops.testing.values import VALUES

    def sample(pairs: list[tuple[Any, ...]], alpha: float, values: Any, seed: int) -> Sample:
        # What overlaps itself cannot be written.
        xs = [TensorArg(shape, dtype, layout) for shape, dtype, layout, _ in pairs]
        ys = [TensorArg(shape, dtype, "contiguous" if layout in OVERLAPPING else layout)
              for shape, dtype, _, layout in pairs]  # fmt: skip
        return Sample((xs, ys, alpha), values, seed)

    shapes = st.lists(st.sampled_from((1, 2, 3, 7, 16, 33, 0)), max_size=3).map(tuple)
    layouts = st.sampled_from(LAYOUTS)
    pairs = st.tuples(shapes, st.sampled_from(_FLOATING), layouts, layouts)
    alphas, seeds = st.sampled_from((1.0, 0.5, -2.0, 0.0)), st.integers(0, 2**16)
    lists = st.lists(pairs, min_size=1, max_size=6)
    return st.builds(sample, lists, alphas, st.sampled_from(VALUES), seeds)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns more tensors than a launch takes, and tensors of several blocks."""
    from cuda_ops.testing.samples import Sample, TensorArg

    many = [TensorArg((37 * i % 500,), torch.bfloat16) for i in range(150)]
    long = [TensorArg((20_001,), torch.float32, layout) for layout in ("contiguous", "offset")]
    return [Sample((tensors, tensors, 0.5)) for tensors in (many, long)]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(torch_foreach_add_ if op.written else torch_foreach_add)


#: Shapes of the tensors of a list, and why.
_POINTS: dict[str, tuple[list[tuple[int, ...]], str]] = {
    "300 x 1000": ([(1000,)] * 300, "many small tensors"),
    "50 x 1024^2": ([(1024, 1024)] * 50, "matrices"),
    "1 x 2^26": ([(1 << 26,)], "a single tensor"),
    "12 layers of 768": (
        [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,),
         (3072, 768), (3072,), (768, 3072), (768,)] * 12,
        "the parameters of a small transformer",
    ),
}  # fmt: skip


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    return [
        _case(name, *point, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for name, point in _POINTS.items()
        # A written list is restored before each call: minutes, for hundreds of small tensors.
        if not (op.written and len(point[0]) > 200)
    ]


def _case(
    name: str, shapes: list[tuple[int, ...]], reason: str, dtype: torch.dtype
) -> BenchmarkCase:
    def make_inputs(device: torch.device) -> tuple[Any, ...]:
        xs, ys = ([torch.randn(s, device=device).to(dtype) for s in shapes] for _ in range(2))
        return xs, ys, 0.5

    numel = sum(torch.Size(shape).numel() for shape in shapes)
    return BenchmarkCase(
        f"{name} {str(dtype).removeprefix('torch.')}",
        make_inputs,
        bytes=3 * numel * dtype.itemsize,
        reason=reason,
        dtype=dtype,
    )
