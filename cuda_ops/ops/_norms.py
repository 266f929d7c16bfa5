"""What ``rms_norm``, ``layer_norm`` and ``add_rms_norm_`` share: dtypes of weights, and cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive import rules
from cuda_ops.derive.arguments import bind
from cuda_ops.derive.checks import dtype_name, refuse
from cuda_ops.spec import BenchmarkCase, OpSpec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample


def fake(op: OpSpec) -> Callable[..., Any]:
    """Makes outputs as the derived fake does, with the gradients of weights in their dtypes, and
    refuses weights that the binding refuses.
    """
    derived = rules.cuda_ops_fake(op)
    assert derived is not None

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(op.argument_names, bind(op, args, kwargs), strict=True))
        outputs = derived(*args, **kwargs)
        x, weights = values["x"], [values[name] for name in ("weight", "bias") if name in values]
        _check_dtypes(op, x.dtype, *(weight.dtype for weight in weights))
        if not op.name.endswith("_backward"):
            return outputs
        pairs = zip(outputs[1:], weights, strict=True)
        return outputs[0], *(made.new_empty(made.shape, dtype=w.dtype) for made, w in pairs)

    return fake


def _check_dtypes(
    op: OpSpec, x: torch.dtype, weight: torch.dtype, bias: torch.dtype | None = None
) -> None:
    """Refuses what ``check_weight`` and ``check_bias`` of ``norm_binding.h`` refuse."""
    allowed = weight_dtypes(x)
    if weight not in allowed:
        expected = f"dtype {dtype_name(x)} like 'x'"
        if len(allowed) > 1:
            expected += f" or {dtype_name(allowed[1])}"
        refuse(op, "weight", expected, dtype_name(weight))
    if bias is not None and bias != weight:
        refuse(op, "bias", f"dtype {dtype_name(weight)} like 'weight'", dtype_name(bias))


def weight_dtypes(x: torch.dtype) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that weights may have, beginning with that of x."""
    return (x, torch.float32) if x.itemsize == 2 else (x,)


def samples(op: OpSpec) -> SearchStrategy[Sample] | None:
    """Gives the derived samples weights of a dtype that is taken, and an eps above 0: a row
    of zeros would be 0 / 0.
    """
    from cuda_ops.testing.samples import TensorArg, strategy

    drawn = strategy(op)
    positions = [op.argument_names.index(n) for n in ("weight", "bias") if n in op.argument_names]

    def fitting(sample: Sample) -> Sample:
        args = list(sample.args)
        first = args[0]
        assert isinstance(first, TensorArg)
        allowed = weight_dtypes(first.dtype)
        for i in positions:
            args[i] = replace(args[i], dtype=allowed[sample.seed % len(allowed)])
        at = op.argument_names.index("eps")
        args[at:] = [max(eps, 1e-5) for eps in args[at:]]
        return replace(sample, args=tuple(args))

    return None if drawn is None else drawn.map(fitting)


def kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns rows for each family of kernels: parts of a warp, blocks, rows read again."""
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

    With ``training`` also steps of it, which move x, the incoming gradient and that of x.
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
