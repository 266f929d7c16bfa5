"""``moe_experts``: shapes, gradients, sharding and samples of routed experts.

``moe_experts`` keeps nothing beside its arguments and runs again for its gradient;
``moe_experts_keep`` also returns the gates and ups that the gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cuda_ops.derive import arguments, batching
from cuda_ops.derive.no_gradient import no_second_derivative
from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _moe, _moe_checks
from cuda_ops.spec import AutocastPolicy, Autograd, BenchmarkCase, Claims, OpSpec, ShardingRule

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Layout, Sample

FORWARD, KEEP, BACKWARD = "moe_experts", "moe_experts_keep", "moe_experts_backward"
INTO = "moe_experts_into_"
# The halves of BACKWARD. The first passes its result on in the order of all tokens' experts.
DOWN, GATE_UP = HALVES = "moe_experts_backward_down", "moe_experts_backward_gate_up"
_BITS = "x", "w_gate_up", "w_down", "weights"  # as `wanted` counts them
_ALL = 15
_OF_MATRICES = 6  # of those, the bits of both matrices


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    """Follows the signature line, except that a gradient which is not wanted has no elements."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = arguments.bind(op, args, kwargs)
        given = dict(zip(op.argument_names, values, strict=True))
        _moe_checks.countable(op, given["experts"])

        def of_wanted(*names: str) -> tuple[torch.Tensor, ...]:
            grads = tuple(given[name].new_empty(given[name].shape) for name in names)
            return _moe.of_wanted(given["wanted"] >> _BITS.index(names[0]), *grads)

        if op.name == INTO:
            _moe_checks.into(op, *values)
            return None
        if op.name in (FORWARD, KEEP):
            x, w_gate_up, _, experts, _ = values
            out = x.new_empty(x.shape)
            kept = x.new_empty(*experts.shape, w_gate_up.shape[1])
            return out if op.name == FORWARD else (out, kept)
        if op.name == BACKWARD:
            return of_wanted(*_BITS)
        if op.name == GATE_UP:
            return of_wanted(*_BITS[:2])
        gate_up = given["gate_up"]
        return gate_up.new_empty(gate_up.shape), *of_wanted(*_BITS[2:])

    return fake


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    if op.name == INTO:
        return None
    if op.name not in (FORWARD, KEEP):
        return no_second_derivative(op.qualname)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *((output[1],) if op.name == KEEP else ()))

    def backward(ctx: Any, grad_out: Any, grad_gate_up: Any = None) -> tuple[Any, ...]:
        # Read once: under a checkpoint each read unpacks again.
        x, w_gate_up, w_down, experts, weights, *saved = ctx.saved_tensors
        inputs = (x, w_gate_up, w_down, experts, weights)
        grads: list[Any] = [None] * 4
        of_x, of_gate_up, of_down, _, of_weights = ctx.needs_input_grad
        wanted = (of_x, of_gate_up, of_down, of_weights)
        if grad_out is not None:
            kept = saved[0] if saved else op.siblings[KEEP].function(*inputs)[1]
            mask = _moe.wanted_bits(wanted)
            results: tuple[Any, ...]
            if _whole(grad_out, *inputs):
                if not torch.compiler.is_dynamo_compiling():  # compiled autograd has no such thing
                    ctx.maybe_clear_saved_tensors()
                rows, *others = op.siblings[DOWN].function(
                    grad_out, w_down, experts, weights, kept, mask
                )
                del kept, saved  # gives its memory back before the largest gradient is made
                of_rows = op.siblings[GATE_UP].function(rows, x, w_gate_up, experts, mask)
                results = (*of_rows, *others)
            else:
                results = op.siblings[BACKWARD].function(grad_out, *inputs, kept, mask)
            grads = [g if one else None for g, one in zip(results, wanted, strict=True)]
        if grad_gate_up is not None:
            for i, more in enumerate(_through_gate_up(grad_gate_up, x, w_gate_up, experts)):
                if wanted[i]:
                    grads[i] = more if grads[i] is None else grads[i] + more
        return grads[0], grads[1], grads[2], None, grads[3]

    return Autograd(setup_context, backward)


def _whole(*tensors: Any) -> bool:
    """Tells whether all tokens are seen together: mapped or sharded parts would each be ordered by
    themselves.
    """
    transformed = torch._C._are_functorch_transforms_active()
    return not transformed and not any(map(is_traceable_wrapper_subclass, tensors))


def _through_gate_up(
    grad: torch.Tensor, x: torch.Tensor, w_gate_up: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of x and w_gate_up where the kept gates and ups are differentiated
    themselves. Sends every token through every expert: right, and not meant to be fast.
    """
    count = w_gate_up.shape[0]
    # Compared with numbers, as a DTensor cannot be with a plain tensor.
    is_chosen = torch.stack([experts == expert for expert in range(count)], 1)
    by_expert = is_chosen.to(grad.dtype) @ grad  # (T, E, 2I)
    rows = by_expert.reshape(x.shape[0], count * grad.shape[2])
    return rows @ w_gate_up.flatten(0, 1), by_expert.permute(1, 2, 0) @ x


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    """Lowers all but the weights, which come from a router in float32 and weight float32 sums."""
    if op.name == INTO:  # what is written has the dtype that it has
        return None
    return {name: "lower_precision" for name in op.argument_names if name != "weights"}


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any] | None:
    """Treats mapped tokens as more tokens. Where matrices are mapped too, or need gradients, each
    part has experts of its own, and a call takes as many parts as its limit of experts allows.
    Half a gradient has no parts, and what is written is none.
    """
    if op.name in (*HALVES, INTO):
        return None

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        size, first = info.batch_size, 1 if op.name == BACKWARD else 0
        values = arguments.bind(op, args, kwargs)
        if size == 0:
            return batching.of_no_parts(op.function, values, in_dims)
        batching.check_part(op, values, in_dims)
        values = _moe.mapped(values, in_dims, size)
        matrices, count = (first + 1, first + 2), values[first + 2].shape[1]
        apart = any(in_dims[i] is not None for i in matrices)
        apart = apart or (op.name == BACKWARD and values[-1] & _OF_MATRICES)

        def call(parts: list[Any]) -> tuple[torch.Tensor, ...]:
            number = parts[first].shape[0]
            if apart:
                parts[first + 3] = _moe.renumbered(parts[first + 3], count)
            flat = [
                v
                if not isinstance(v, torch.Tensor)
                else v[0]
                if i in matrices and not apart
                else v.flatten(0, 1)
                for i, v in enumerate(parts)
            ]
            results = op.function(*flat)
            results = (results,) if isinstance(results, torch.Tensor) else results
            return tuple(r.reshape(number, r.shape[0] // number, *r.shape[1:]) for r in results)

        at_once = max(1, op.ranges["e"].most // max(1, count)) if apart else size
        if size <= at_once:
            outputs = call(values)
        else:
            slices = [slice(begin, begin + at_once) for begin in range(0, size, at_once)]
            calls = [
                call([v[s] if isinstance(v, torch.Tensor) else v for v in values]) for s in slices
            ]
            outputs = tuple(torch.cat(each) for each in zip(*calls, strict=True))
        return (outputs, (0,) * len(outputs)) if len(outputs) > 1 else (outputs[0], 0)

    return rule


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]] | None:
    """Shards tokens and keeps experts whole, whose gradients are then partial sums. Nothing shards
    in half a gradient.
    """
    if op.name == INTO:
        return None

    def rule(*args: Any, **kwargs: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        whole, tokens = Replicate(), Shard(0)
        outputs, inputs = len(op.parsed.returns), len(op.tensor_positions)
        wanted = args[inputs] if len(args) > inputs else kwargs.get("wanted", _ALL)
        flags = [None] * (len(args) + len(kwargs) - inputs)
        rules: list[ShardingRule] = [([whole] * outputs, [*[whole] * inputs, *flags])]
        places = [tokens, whole, whole, tokens, tokens]
        if op.name in (FORWARD, KEEP):
            rules.append(([tokens] * outputs, places))
        # A gradient without elements has nothing to shard.
        elif op.name == BACKWARD and wanted == _ALL:
            grads = [tokens, Partial(), Partial(), tokens]
            rules.append((grads, [tokens, *places, tokens, *flags]))
        return rules

    return rule


# --- testing and timing --------------------------------------------------------------------


@hookimpl
def cuda_ops_flops(op: OpSpec) -> Callable[..., int]:
    """Counts the products: three of the forward, and of the backward those that are wanted."""

    def forward(x: Any, w_gate_up: Any, w_down: Any, experts: Any, weights: Any) -> int:
        return 3 * _moe.product_flops(w_down, experts)

    def down(
        grad_out: Any, w_down: Any, experts: Any, weights: Any, gate_up: Any, wanted: int = _ALL
    ) -> int:
        return (1 + _wants(wanted, "w_down")) * _moe.product_flops(w_down, experts)

    def gate_up(rows: Any, x: Any, w_gate_up: Any, experts: Any, wanted: int = _ALL) -> int:
        count = _wants(wanted, "x") + _wants(wanted, "w_gate_up")
        return count * _moe.product_flops(w_gate_up, experts)

    def backward(
        grad_out: Any, x: Any, w_gate_up: Any, w_down: Any, experts: Any, weights: Any, kept: Any,
        wanted: int = _ALL,
    ) -> int:  # fmt: skip
        of_down = down(grad_out, w_down, experts, weights, kept, wanted)
        return of_down + gate_up(kept, x, w_gate_up, experts, wanted)

    def into(x: Any, w_gate_up: Any, w_down: Any, experts: Any, weights: Any, outs: Any) -> int:
        return forward(x, w_gate_up, w_down, experts, weights)

    formulas: dict[str, Callable[..., int]] = {
        BACKWARD: backward, DOWN: down, GATE_UP: gate_up, INTO: into,
    }  # fmt: skip
    return formulas.get(op.name, forward)


def _wants(wanted: int, name: str) -> bool:
    return bool(wanted >> _BITS.index(name) & 1)


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    references: dict[str, Callable[..., Any]] = {
        FORWARD: _moe.mixture,
        KEEP: _moe.kept_mixture,
        INTO: _moe.mixture_into,
        BACKWARD: _moe.mixture_backward,
        DOWN: _moe.backward_down,
        GATE_UP: _moe.backward_gate_up,
    }
    return references[op.name]


@hookimpl
def cuda_ops_claims(op: OpSpec) -> Claims:
    return _moe.CLAIMS


def _sample(
    op: OpSpec, tokens: int, hidden: int, inner: int, count: int, k: int, dtype: torch.dtype,
    layout: Layout = "contiguous", seed: int = 0,
) -> Sample:  # fmt: skip
    """Draws any routing: experts without tokens, one with all, one chosen twice."""
    from cuda_ops.testing.samples import Sample, TensorArg

    wide = torch.float64 if dtype is torch.float64 else torch.float32
    rows = TensorArg((tokens, hidden), dtype, layout)
    w_gate_up = TensorArg((count, 2 * inner, hidden), dtype)
    w_down = TensorArg((count, hidden, inner), dtype)
    experts = TensorArg((tokens, k), torch.int64, below=count)
    weights = TensorArg((tokens, k), wide)
    inputs = (rows, w_gate_up, w_down, experts, weights)
    gate_up = TensorArg((tokens, k, 2 * inner), dtype)
    parts = next(n for n in (3, 2, 1) if tokens % n == 0)
    arguments: dict[str, tuple[Any, ...]] = {
        FORWARD: inputs,
        KEEP: inputs,
        INTO: (*inputs, [TensorArg((tokens // parts, hidden), dtype)] * parts),
        BACKWARD: (rows, *inputs, gate_up),
        DOWN: (rows, w_down, experts, weights, gate_up),
        GATE_UP: (TensorArg((tokens, k, 2 * inner), dtype, layout), rows, w_gate_up, experts),
    }
    return Sample(arguments[op.name], seed=seed)


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    return _moe.samples(partial(_sample, op))


#: Tokens, H, I, E and k of mixtures for each family of kernels, as tests/test_moe_kernels.py
#: compares with the plan.
_KERNELS = (
    (1, 264, 136, 8, 2, torch.bfloat16),  # streamed: one token
    (8, 264, 136, 16, 2, torch.float16),  # tiles of 8, 16 and 32, without and with a map
    (30, 264, 136, 7, 2, torch.bfloat16),
    (30, 264, 136, 4, 2, torch.float16),
    (70, 264, 136, 64, 2, torch.bfloat16),
    (70, 264, 136, 16, 2, torch.float16),
    (70, 264, 136, 8, 2, torch.bfloat16),
    (300, 264, 520, 5, 2, torch.bfloat16),  # Hopper's tall tiles, of which blocks take several
    (330, 3464, 136, 5, 2, torch.bfloat16),
    (330, 72, 1800, 5, 2, torch.float16),
    (2100, 776, 392, 3, 2, torch.float16),  # even ones, of as many assignments as several sort
    (800, 72, 1025, 16, 2, torch.bfloat16),  # mma.sync's large tile, of all three products
    (100, 72, 136, 3, 2, torch.float32),
)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    return [_sample(op, *kernel) for kernel in _KERNELS]


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    """Returns none: it is timed as a part of ``moe``."""
    return []
