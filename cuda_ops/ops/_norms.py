"""What ``rms_norm``, ``layer_norm`` and ``add_rms_norm_`` share: dtypes of gradients, and cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive.arguments import bind, tensor_arguments
from cuda_ops.derive.layout import empty_outputs
from cuda_ops.spec import BenchmarkCase, OpSpec

if TYPE_CHECKING:
    from cuda_ops.testing.samples import Sample


def fake_gradient(op: OpSpec) -> Callable[..., Any]:
    """Makes outputs as the derived fake does, with the gradients of weights in their dtypes."""
    signature = op.signature
    assert signature is not None

    def fake(*args: Any, **kwargs: Any) -> Any:
        tensors = tensor_arguments(op, bind(op, args, kwargs))
        grad_x, *of_weights = empty_outputs(op, signature, tensors)
        weights = [tensor for tensor in tensors[2:] if tensor is not None]
        pairs = zip(of_weights, weights, strict=True)
        return grad_x, *(made.new_empty(made.shape, dtype=w.dtype) for made, w in pairs)

    return fake


def kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns rows for each family of kernels: parts of a warp, blocks, rows that are read again."""
    from cuda_ops.testing.samples import Sample, TensorArg

    assert op.signature is not None
    loops = [group.loops for group in op.signature.inputs]

    def sample(rows: int, n: int, dtype: torch.dtype, weight: torch.dtype) -> Sample:
        return Sample(
            tuple(TensorArg((rows, n), dtype) if own else TensorArg((n,), weight) for own in loops)
        )

    half, wide = torch.bfloat16, torch.float32
    return [
        sample(rows, n, dtype, weight)
        for dtype, weight in ((half, half), (half, wide), (wide, wide))
        for rows, n in ((300, 24), (70, 1000), (40, 4096), (3, 16_384), (2, 40_000), (5, 4099))
    ]


#: Rows, their length and why.
_POINTS = (
    (1, 4096, "one token"),
    (64, 4096, "a small batch of tokens"),
    (1 << 18, 128, "the heads of queries and keys"),
    (1 << 15, 1024, "short rows"),
    (1 << 14, 4096, "hidden states of many tokens"),
    (1 << 13, 8192, "the same of a larger model"),
    (1 << 12, 16_384, "long rows"),
    (1 << 14, 4100, "no row is whole 16-byte vectors"),
)


def cases(op: OpSpec, moved: int, training: bool = True) -> list[BenchmarkCase]:
    """Returns cases for an operator that moves so many tensors of the size of x.

    With ``training`` also steps of it, which move three more: x, the incoming gradient and that of x.
    """
    made = [
        _case(op, *point, dtype, moved)
        for dtype in (torch.bfloat16, torch.float32)
        for point in _POINTS
    ]
    if training:
        made += [
            _case(op, rows, n, reason, torch.bfloat16, moved + 3, backward=True)
            for rows, n, reason in _POINTS[2:]
        ]
    return made


def _case(
    op: OpSpec,
    rows: int,
    n: int,
    reason: str,
    dtype: torch.dtype,
    moved: int,
    backward: bool = False,
) -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import maker

    assert op.signature is not None
    loops = [group.loops for group in op.signature.inputs]
    shapes = tuple(((rows, n) if own else (n,), dtype) for own in loops)
    weights = loops.count(False) * (2 if backward else 1)
    return BenchmarkCase(
        f"{rows}x{n} {str(dtype).removeprefix('torch.')}"
        + (", forward and backward" if backward else ""),
        maker(shapes),
        bytes=(moved * rows + weights) * n * dtype.itemsize,
        reason=reason,
        dtype=dtype,
        arithmetic="fp32",
        backward=backward,
    )
