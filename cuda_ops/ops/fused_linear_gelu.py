"""``fused_linear_gelu``: three operators behind one function, and gradients made of products.

``fused_linear_gelu`` keeps nothing beside its arguments and has ``fused_linear_gelu_slope``
multiply once more for its gradient; ``fused_linear_gelu_keep`` also returns the values before gelu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from cuda_ops.derive.arguments import bind, tensor_arguments
from cuda_ops.derive.checks import check_batch, check_flag
from cuda_ops.derive.layout import as_rows, empty_outputs
from cuda_ops.hookspecs import hookimpl
from cuda_ops.registry import function
from cuda_ops.spec import AutocastPolicy, Autograd, BenchmarkCase, OpSpec, Peer, ShardingRule

if TYPE_CHECKING:
    from cuda_ops.testing.samples import Layout, Sample

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
        check_flag(op, "save_preactivation", save_preactivation)
        wanted = any(t is not None and t.requires_grad for t in (x, weight, bias))
        if save_preactivation and wanted and torch.is_grad_enabled():
            out: torch.Tensor = op.siblings[KEEP].function(x, weight, bias)[0]
        else:
            out = op.function(x, weight, bias)
        return out

    fused_linear_gelu.__doc__ = _DOC
    return fused_linear_gelu


_DOC = """gelu(x @ weight^T + bias) in its tanh approximation, without a second pass over memory.

Shapes: x (..., I), weight (O, I) as nn.Linear keeps it, bias (O) or None, of any strides; the
result (..., O) is contiguous. Leading dims of weight and bias broadcast with those of x.
Dtypes: float64, float32, float16 or bfloat16, the same for all. Sums, bias and gelu run in float64
for float64 and in float32 for the others, and are rounded once.

Args:
    x, weight, bias: as torch.nn.functional.linear takes them.
    save_preactivation: keep x @ weight^T + bias for the gradient, as much memory as the result;
        otherwise the gradient multiplies x and weight once more.

Memory: on Hopper GPUs, during the call, copies of a 16-bit x or weight whose rows do not start at
multiples of 16 bytes, if copying makes the call faster.
Errors: RuntimeError for an argument that is not a tensor, a save_preactivation that is no bool,
different sizes of I or O, any other dtype, mixed dtypes or devices, or leading dims that do not
broadcast or of which more than 16 are not 1.
Formula: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415, section 2.

Example:
>>> x, weight, bias = torch.ones(1, 2), torch.eye(2), torch.tensor([0.0, 1.0])
>>> cuda_ops.fused_linear_gelu(x, weight, bias)
tensor([[0.8412, 1.9546]])
"""


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    """Makes outputs as the derived fake does, and refuses a batch that the binding refuses."""
    signature = op.signature
    assert signature is not None

    def fake(*args: Any, **kwargs: Any) -> Any:
        tensors = tensor_arguments(op, bind(op, args, kwargs))
        outputs = empty_outputs(op, signature, tensors)
        x = tensors[1 if op.name == SLOPE else 0]
        assert x is not None
        check_batch(op, "x", x, outputs[0].shape[:-1])
        return outputs if op.name == KEEP else outputs[0]

    return fake


# --- sharding ----------------------------------------------------------------------------


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]]:
    """Shards rows of x, or columns of out with their rows of the weight. It does not shard I, since
    gelu needs whole sums, nor weights of which each row of x has its own.
    """

    def rule(*args: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Replicate, Shard

        outputs, grads = (2 if op.name == KEEP else 1), (1 if op.name == SLOPE else 0)
        x, bias = args[grads], args[grads + 2] if len(args) > grads + 2 else None
        whole = [None if a is None else Replicate() for a in args]
        last = len(x.shape) - 1
        rules: list[ShardingRule] = [([Replicate()] * outputs, whole)]
        alike = all(a.shape[:-1] == x.shape[:-1] for a in args[:grads])
        one_weight = len(args[grads + 1].shape) == 2 and (bias is None or len(bias.shape) == 1)
        if not (alike and one_weight):
            return rules
        for d in range(last):
            rows = [Shard(d)] * (grads + 1)
            rules.append(([Shard(d)] * outputs, [*rows, *whole[grads + 1 :]]))
        columns: list[Any] = [*([Shard(last)] * grads), Replicate(), Shard(0)]
        columns += [None if bias is None else Shard(0)] * (len(args) > grads + 2)
        return [*rules, ([Shard(last)] * outputs, columns)]

    return rule


@hookimpl
def cuda_ops_flops(op: OpSpec) -> Callable[..., int]:
    """Counts the one product of each operator; gradients multiply through ``matmul``."""

    def slope(grad_out: Any, x: Any, weight: Any, bias: Any = None) -> int:
        return linear_flops(x, weight)

    return slope if op.name == "fused_linear_gelu_slope" else linear_flops


def linear_flops(x: Sequence[int], weight: Sequence[int], bias: Any = None) -> int:
    """Returns the FLOPs of the product of x (..., I) and weight (O, I), from their shapes."""
    return 2 * math.prod(x) * weight[0]


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy:
    return "lower_precision"


# --- gradients ---------------------------------------------------------------------------


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = function("matmul")(x.unsqueeze(-2), weight.mT).squeeze(-2)
    return product if bias is None else product + bias


def _linear_backward(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Returns gradients of x, weight and bias from that of x @ weight^T + bias; autograd sums over
    broadcast dims. ``x`` and ``weight`` are needed for each other's gradient alone.
    """
    matmul, sum_rows = function("matmul"), function("sum_rows")
    if not ctx.one_product:
        return [
            matmul(grad.unsqueeze(-2), weight).squeeze(-2) if wanted[0] else None,
            matmul(grad.unsqueeze(-1), x.unsqueeze(-2)) if wanted[1] else None,
            grad if len(wanted) > 2 and wanted[2] else None,
        ]
    rows = as_rows(grad)
    return [
        matmul(rows, weight).reshape(*grad.shape[:-1], weight.shape[1]) if wanted[0] else None,
        matmul(rows.mT, as_rows(x)) if wanted[1] else None,
        sum_rows(rows.mT) if len(wanted) > 2 and wanted[2] else None,
    ]


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.set_materialize_grads(False)
        out = output[0] if op.name == KEEP else output
        x, weight, *bias = inputs[1:] if op.name == SLOPE else inputs
        # One product will not do if rows have weights or biases of their own, or if x has fewer.
        one_of_each = weight.dim() == 2 and all(b is None or b.dim() == 1 for b in bias)
        ctx.one_product = one_of_each and x.shape[:-1] == out.shape[:-1]
        if op.name == KEEP:
            of_x, of_weight = ctx.needs_input_grad[:2]
            saved = x if of_weight else None, weight if of_x else None, output[1]
        else:
            saved = inputs  # the slope depends on all
        ctx.save_for_backward(*saved)

    def keep_backward(ctx: Any, grad_out: Any, grad_preactivation: Any) -> tuple[Any, ...]:
        x, weight, preactivation = ctx.saved_tensors
        grad = grad_preactivation
        if grad_out is not None:
            through = function("gelu_approx_backward")(grad_out, preactivation)
            grad = through if grad is None else through + grad
        return finish(ctx, grad, x, weight)

    def forward_backward(ctx: Any, grad_out: Any) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        if grad_out is None:
            return finish(ctx, None, *inputs[:2])
        return finish(ctx, op.siblings[SLOPE].function(grad_out, *inputs), *inputs[:2])

    def finish(ctx: Any, grad: Any, x: Any, weight: Any) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(wanted)
        return tuple(_linear_backward(ctx, grad, x, weight, wanted)[: len(wanted)])

    def slope_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        grad_out, x, weight, *bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(wanted)
        preactivation = _linear(x, weight, bias[0] if bias else None)
        second_order = function("gelu_approx_backward_backward")
        grad_grad_out, grad_sum = second_order(grad, grad_out, preactivation)
        grads = _linear_backward(ctx, grad_sum, x, weight, wanted[1:])
        return grad_grad_out, *grads[: len(wanted) - 1]

    backwards: dict[str, Callable[..., Any]] = {
        FORWARD: forward_backward,
        KEEP: keep_backward,
        SLOPE: slope_backward,
    }
    return Autograd(setup_context, backwards[op.name])


# --- testing and timing --------------------------------------------------------------------


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes the result with torch's operators; each row of x may have a weight of its own."""
    sums = (x.unsqueeze(-2) @ weight.mT).squeeze(-2)
    return F.gelu(sums if bias is None else sums + bias, approximate="tanh")


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return reference if op.name == FORWARD else None


#: Rows, O, I, the layouts of x and of the weight, for each family of kernels;
#: tests/test_fused_linear_gelu.py compares them with the plan.
_KERNELS: tuple[tuple[int, int, int, Layout, Layout, torch.dtype], ...] = (
    (100, 20_000, 136, "contiguous", "contiguous", torch.bfloat16),  # wide tiles
    (2000, 2104, 200, "contiguous", "contiguous", torch.float16),  # pairs, more than SMs
    (260, 264, 1041, "contiguous", "contiguous", torch.bfloat16),  # copies, and three parts of I
    (520, 1000, 2056, "contiguous", "contiguous", torch.float16),  # two parts
    (264, 10, 264, "contiguous", "contiguous", torch.bfloat16),  # narrow tiles
    (264, 24, 1032, "contiguous", "contiguous", torch.bfloat16),  # three parts
    (24, 6000, 1544, "contiguous", "contiguous", torch.float16),  # two, and swapped
    (301, 264, 1032, "transposed", "contiguous", torch.bfloat16),  # a copy of one
    (264, 301, 1032, "contiguous", "transposed", torch.float16),
    (3, 520, 1032, "contiguous", "contiguous", torch.bfloat16),  # streams
    (520, 3, 264, "contiguous", "contiguous", torch.float16),
    (1544, 1544, 21, "contiguous", "contiguous", torch.bfloat16),  # mma.sync's large tile
    (1, 520, 264, "contiguous", "contiguous", torch.float32),  # vectors
    (520, 2, 264, "contiguous", "contiguous", torch.float32),
    (1530, 1400, 200, "contiguous", "contiguous", torch.float32),  # multiply-adds
    (520, 500, 100, "transposed", "transposed", torch.float32),
)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    from cuda_ops.testing.samples import Sample, TensorArg

    def sample(rows: int, o: int, i: int, x: Layout, weight: Layout, dtype: torch.dtype) -> Sample:
        grads = [TensorArg((rows, o), dtype)] if op.name == SLOPE else []
        inputs = TensorArg((rows, i), dtype, x), TensorArg((o, i), dtype, weight)
        return Sample((*grads, *inputs, TensorArg((o,), dtype)))

    return [sample(*kernel) for kernel in _KERNELS]


def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Runs two kernels, with the values between them in memory."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def addmm_activation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Runs torch's own fused kernel, which is not differentiable."""
    out: torch.Tensor = torch._addmm_activation(bias, x, weight.mT, use_gelu=True)
    return out


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer] | None:
    from cuda_ops.benchmarking.peers import torch_peers

    if op.name != FORWARD:
        return None
    return {**torch_peers(eager), "addmm_activation": addmm_activation}


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    if op.name != FORWARD:
        return None

    def kept(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = op.siblings[KEEP].function(*tensors)[0]
        return out

    training = [_case(*point, kept, {"recomputed": op.function}) for point in _TRAINING]
    return [*(_case(*point) for point in _POINTS), *training]


#: Rows, O, I and why.
_POINTS = (
    *((rows, 14336, 4096, f"Llama-3 8B, up projection of {rows} tokens")
      for rows in (1, 16, 64, 128, 512, 2048, 4096, 8192)),
    (4096, 4096, 14336, "the same, down projection"),
    (4096, 16384, 4096, "four times as wide, as in GPT-3's layers"),
    (16, 28672, 8192, "Llama-3 70B, 16 tokens: weights are streamed"),
    (4096, 28672, 8192, "the same, 4096 tokens"),
)  # fmt: skip
_TRAINING = tuple(
    (rows, 14336, 4096, f"Llama-3 8B, training on {rows} tokens") for rows in (4096, 8192)
)


def _case(
    rows: int,
    o: int,
    i: int,
    reason: str,
    function: Callable[..., Any] | None = None,
    peers: dict[str, Callable[..., Any]] | None = None,
) -> BenchmarkCase:
    """Makes a case; with ``function`` and ``peers`` one of a step of training, which multiplies
    twice more and reads everything again.
    """
    backward = peers is not None

    def inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
        shapes = ((rows, i), (o, i), (o,))
        return tuple(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)

    return BenchmarkCase(
        f"{rows}x{o}x{i} bfloat16" + (", forward and backward" if backward else ""),
        inputs,
        bytes=(rows * i + o * i + o + rows * o) * 2 * (3 if backward else 1),
        flops=linear_flops((rows, i), (o, i)) * (3 if backward else 1),
        function=function,
        peers=peers or {},
        reason=reason,
        dtype=torch.bfloat16,
        backward=backward,
    )
