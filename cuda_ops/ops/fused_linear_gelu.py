"""``fused_linear_gelu``: three operators under one function, and gradients made of matmul's.

``fused_linear_gelu`` keeps nothing beside its arguments and has ``fused_linear_gelu_slope``
multiply once more for its gradient; ``fused_linear_gelu_keep`` also returns the values before gelu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from cuda_ops import shapes
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import AutocastPolicy, Autograd, BenchmarkCase, OpSpec, ShardingRule
from cuda_ops.testing.samples import LAYOUTS, VALUES, Sample, TensorArg

FORWARD, KEEP, SLOPE = (
    "fused_linear_gelu",
    "fused_linear_gelu_keep",
    "fused_linear_gelu_slope",
)


@hookimpl
def cuda_ops_public(op: OpSpec) -> Callable[..., Any] | None:
    if op.name != FORWARD:
        return None

    def fused_linear_gelu(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        save_preactivation: bool = False,
    ) -> torch.Tensor:
        if save_preactivation and torch.is_grad_enabled():
            out: torch.Tensor = op.siblings[KEEP].function(x, weight, bias)[0]
        else:
            out = op.function(x, weight, bias)
        return out

    fused_linear_gelu.__doc__ = _DOC
    return fused_linear_gelu


_DOC = """gelu(x @ weight^T + bias) in its tanh approximation, without a second pass over memory.

Shapes: x (..., I), weight (O, I) as nn.Linear keeps it, bias (O) or None, of any strides; the
result (..., O) is contiguous.
Dtypes: float64, float32, float16 or bfloat16, the same for all. Sums, bias and gelu run in float64
for float64 and in float32 for the others, and are rounded once.

Args:
    x, weight, bias: as torch.nn.functional.linear takes them.
    save_preactivation: keep x @ weight^T + bias for the gradient, as many bytes as the result has;
        otherwise the gradient multiplies x and weight once more.

Raises:
    RuntimeError: an I or O that differs, another dtype, two dtypes, two devices, a weight that is
        not a matrix or a bias that is not a vector.

Formula: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415, section 2.
"""


# --- shapes ------------------------------------------------------------------------------


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    def fake(*tensors: torch.Tensor | None) -> Any:
        tensors = (*tensors, None) if len(tensors) < len(op.tensor_positions) else tensors
        shapes.check_arguments(op, tensors)
        x, weight, bias = tensors[-3:]
        assert x is not None and weight is not None
        _check_rank(op, "weight", weight, "2 dims (o, i)", 2)
        if bias is not None:
            _check_rank(op, "bias", bias, "1 dim (o)", 1)
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        return (out, torch.empty_like(out)) if op.name == KEEP else out

    return fake


def _check_rank(op: OpSpec, name: str, tensor: torch.Tensor, expected: str, rank: int) -> None:
    if tensor.dim() != rank:
        actual = f"shape {shapes.shape_name(tensor.shape)}"
        raise RuntimeError(
            f"{op.qualname}: argument '{name}': expected {expected}, got {actual}"
        )


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any]:
    """A mapped dim of x is one more row dim. A weight or bias of its own for each index is
    another product: one call each.
    """
    rows = 2 if op.name == SLOPE else 1

    def rule(info: Any, in_dims: tuple[Any, ...], *args: torch.Tensor | None) -> Any:
        if all(d is None for d in in_dims[rows:]):
            moved = [
                a.movedim(d, 0) if d is not None else a.expand(info.batch_size, *a.shape)
                for a, d in zip(args[:rows], in_dims[:rows], strict=True)
                if a is not None
            ]
            out = op.function(*moved, *args[rows:])
        else:
            calls = [
                op.function(
                    *(
                        a if a is None or d is None else a.select(d, i)
                        for a, d in zip(args, in_dims, strict=True)
                    )
                )
                for i in range(info.batch_size)
            ]
            if op.name == KEEP:
                out = tuple(torch.stack(each) for each in zip(*calls, strict=True))
            else:
                out = torch.stack(calls)
        return out, ((0, 0) if op.name == KEEP else 0)

    return rule


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]]:
    """Rows of x, or the columns of out with their rows of the weight. Not I: gelu needs whole
    sums.
    """

    def rule(*args: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Replicate, Shard

        outputs, grads = (2 if op.name == KEEP else 1), (1 if op.name == SLOPE else 0)
        x, bias = args[grads], args[grads + 2] if len(args) > grads + 2 else None
        given = [None if a is None else Replicate() for a in args]
        last = len(x.shape) - 1
        rules: list[ShardingRule] = [([Replicate()] * outputs, given)]
        for d in range(last):
            rows = [Shard(d)] * (grads + 1)
            rules.append(([Shard(d)] * outputs, [*rows, *given[grads + 1 :]]))
        columns: list[Any] = [*([Shard(last)] * grads), Replicate(), Shard(0)]
        columns += [None if bias is None else Shard(0)] * (len(args) > grads + 2)
        return [*rules, ([Shard(last)] * outputs, columns)]

    return rule


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy:
    return "lower_precision"


# --- gradients ---------------------------------------------------------------------------


def _operator(name: str) -> Callable[..., Any]:
    """Of another pair, as formulas call it."""
    from cuda_ops.registry import registry

    registry().public(name)
    operator = registry().loaded(name)
    assert operator is not None
    return operator.direct


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    product: torch.Tensor = _operator("matmul")(rows, weight.mT)
    product = product if x.dim() > 1 else product.squeeze(0)
    return product if bias is None else product + bias


def _linear_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Gradients of x, weight and bias from that of x @ weight^T + bias."""
    matmul = _operator("matmul")
    rows = grad.reshape(-1, grad.shape[-1])
    columns = rows.mT
    return [
        matmul(rows, weight).reshape(x.shape) if wanted[0] else None,
        matmul(columns, x.reshape(-1, x.shape[-1])) if wanted[1] else None,
        _operator("sum_rows")(columns) if len(wanted) > 2 and wanted[2] else None,
    ]


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        kept = (output[1],) if op.name == KEEP else ()
        ctx.save_for_backward(*inputs, *kept)
        ctx.set_materialize_grads(False)

    def keep_backward(ctx: Any, grad_out: Any, grad_preactivation: Any) -> tuple[Any, ...]:
        *inputs, preactivation = ctx.saved_tensors
        grad = grad_preactivation
        if grad_out is not None:
            through = _operator("gelu_approx_backward")(grad_out, preactivation)
            grad = through if grad is None else through + grad
        return finish(ctx, grad, inputs)

    def forward_backward(ctx: Any, grad_out: Any) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        if grad_out is None:
            return finish(ctx, None, inputs)
        return finish(ctx, op.siblings[SLOPE].function(grad_out, *inputs), inputs)

    def finish(ctx: Any, grad: Any, inputs: Any) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(wanted)
        return tuple(_linear_backward(grad, inputs[0], inputs[1], wanted)[: len(wanted)])

    def slope_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        grad_out, x, weight, *bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(wanted)
        preactivation = _linear(x, weight, bias[0] if bias else None)
        second_order = _operator("gelu_approx_backward_backward")
        grad_grad_out, grad_sum = second_order(grad, grad_out, preactivation)
        return grad_grad_out, *_linear_backward(grad_sum, x, weight, wanted[1:])[: len(wanted) - 1]

    backward = {FORWARD: forward_backward, KEEP: keep_backward, SLOPE: slope_backward}[op.name]
    return Autograd(setup_context, backward)


# --- testing and timing --------------------------------------------------------------------


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    """Rows of any rank, one weight, a bias or none."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        sizes = st.sampled_from((1, 2, 3, 8, 17, 40))
        i, o = draw(sizes), draw(sizes)
        rows = tuple(draw(st.lists(st.sampled_from((1, 2, 5, 33)), max_size=2)))
        empty = draw(st.integers(0, 11))
        i, o = (0 if empty == 0 else i), (0 if empty == 1 else o)
        rows = (0, *rows[1:]) if empty == 2 else rows
        dtype = draw(st.sampled_from(op.dtypes))

        def tensor(*shape: int) -> TensorArg:
            fitting = [layout for layout in LAYOUTS if layout != "channels_last"]
            if len(shape) < 2:
                fitting.remove("transposed")
            return TensorArg(shape, dtype, draw(st.sampled_from(fitting)))

        grad = [tensor(*rows, o)] if op.name == SLOPE else []
        bias = tensor(o) if draw(st.booleans()) else None
        args = (*grad, tensor(*rows, i), tensor(o, i), bias)
        return Sample(args, draw(st.sampled_from(VALUES)), draw(st.integers(0, 2**16)))

    return drawn()


def eager(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Two kernels, and the values between them through memory."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def addmm_activation(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """torch's own fused kernel, which is not differentiable."""
    out: torch.Tensor = torch._addmm_activation(bias, x, weight.mT, use_gelu=True)
    return out


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    if op.name != FORWARD:
        return None
    return [_case(*point) for point in _POINTS]


#: Rows, O, I and why.
_POINTS = (
    (4096, 14336, 4096, "Llama-3 8B, up projection of 4096 tokens"),
    (4096, 4096, 14336, "the same, down projection"),
    (512, 14336, 4096, "512 tokens"),
    (16, 14336, 4096, "16 tokens: weights are streamed"),
)


def _case(rows: int, o: int, i: int, reason: str) -> BenchmarkCase:
    def inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
        shapes_ = ((rows, i), (o, i), (o,))
        return tuple(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes_)

    return BenchmarkCase(
        f"{rows}x{o}x{i} bfloat16",
        inputs,
        bytes=(rows * i + o * i + o + rows * o) * 2,
        flops=2 * rows * o * i,
        peers={**torch_peers(eager), "addmm_activation": addmm_activation},
        reason=reason,
        dtype=torch.bfloat16,
    )
