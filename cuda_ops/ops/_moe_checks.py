"""What the operators of a mixture of experts refuse, for tensors without data too.

The checks of ``moe_binding.h``, ``moe_route.cpp`` and ``moe_experts.cpp`` once more, in their order
and words, as :mod:`cuda_ops.derive.checks` does for signature lines; and those of ``cuda_ops.moe``,
which alone sees both the logits and the matrices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cuda_ops.derive import checks, sizes
from cuda_ops.spec import OpSpec

#: The limits of ``moe.h``.
MOST_EXPERTS, MOST_CHOSEN, MOST_ASSIGNMENTS = 512, 16, 2**31

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def mixture(
    op: OpSpec,
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: Any,
) -> None:
    """Of ``cuda_ops.moe``: what its parts cannot compare, or would say of arguments that its caller
    did not give. The rest is theirs.
    """
    tensors = {"x": x, "router_logits": router_logits, "w_gate_up": w_gate_up, "w_down": w_down}
    for name, tensor in tensors.items():
        if tensor.is_nested:  # and has no shape to compare
            checks.refuse(op, name, "a strided tensor", "a nested one")
    if x.dim() < 1:
        checks.refuse(op, "x", "at least 1 dim (..., H)", "shape []")
    if w_down.dim() != 3:
        _refuse_shape(op, "w_down", "3 dims (E, H, I)", w_down)
    checks.check_device(op, "router_logits", router_logits, "x", x)
    expected = (*x.shape[:-1], w_down.shape[0])
    # Of sizes that have no value yet the parts say so: torch.compile takes no check with a text of
    # its own here. Elsewhere tuples are compared, whose sizes are tensors while torch.jit traces.
    compare = sizes.may_be_equal if torch.compiler.is_compiling() else operator.eq
    if not compare(router_logits.shape, expected):
        wanted = f"shape (..., E) = {sizes.shape_name(expected)}"
        _refuse_shape(op, "router_logits", wanted, router_logits)
    tokens: Any = math.prod(x.shape[:-1])  # or a tensor
    numbers = isinstance(tokens, int) and isinstance(top_k, int)
    if numbers and sizes.is_surely_true(tokens * top_k >= MOST_ASSIGNMENTS):
        wanted = "fewer than 2^31 choices of all tokens together"
        checks.refuse(op, "top_k", wanted, f"{top_k} of each of {tokens} tokens")


def route(
    op: OpSpec,
    router_logits: torch.Tensor,
    top_k: int,
    scoring: int,
    renormalize: bool,
    bias: torch.Tensor | None,
) -> None:
    """Of ``moe_route``, whose arguments these are."""
    checks.check_arguments(op, [router_logits, bias])
    _logits(op, router_logits)
    most = min(router_logits.shape[1], MOST_CHOSEN)
    _between(op, "top_k", top_k, most=most, least=1)
    _between(op, "scoring", scoring, most=1)
    if bias is not None:
        _floating(op, "expert_bias", bias)
        _shape(op, "expert_bias", bias, "(E)", (router_logits.shape[1],))


def route_backward(
    op: OpSpec,
    grad_weights: torch.Tensor,
    router_logits: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    scoring: int,
    renormalize: bool,
) -> None:
    """Of ``moe_route_backward``, likewise."""
    checks.check_arguments(op, [grad_weights, router_logits, weights, experts])
    _logits(op, router_logits)
    _between(op, "scoring", scoring, most=1)
    if experts.dim() != 2:
        _refuse_shape(op, "experts", "2 dims (T, k)", experts)
    top_k = experts.shape[1]
    if not 1 <= top_k <= MOST_CHOSEN:
        _refuse_shape(op, "experts", f"from 1 to {MOST_CHOSEN} a token", experts)
    _dtype(op, "experts", experts, torch.int64)
    choices = {"experts": experts, "weights": weights, "grad_weights": grad_weights}
    for name, tensor in choices.items():
        _shape(op, name, tensor, "(T, k)", (router_logits.shape[0], top_k))
    _floating(op, "weights", weights)
    _floating(op, "grad_weights", grad_weights)


def index_map(op: OpSpec, experts: torch.Tensor, num_experts: int) -> None:
    """Of ``moe_route_map``."""
    checks.check_arguments(op, [experts])
    _dtype(op, "experts", experts, torch.int64)
    _between(op, "num_experts", num_experts, most=MOST_EXPERTS, least=1)
    _countable(op, experts)


def experts(op: OpSpec, *tensors: torch.Tensor) -> None:
    """Of ``moe_experts`` and ``moe_experts_keep``."""
    checks.check_arguments(op, tensors)
    _experts(op, *tensors)


def experts_backward(
    op: OpSpec,
    grad_out: torch.Tensor,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    wanted: int,
) -> None:
    """Of ``moe_experts_backward``."""
    inputs = (x, w_gate_up, w_down, chosen, weights)
    checks.check_arguments(op, [grad_out, *inputs, gate_up])
    _experts(op, *inputs)
    _dtype(op, "grad_out", grad_out, x.dtype)
    _dtype(op, "gate_up", gate_up, x.dtype)
    _shape(op, "grad_out", grad_out, "(T, H)", x.shape)
    _shape(op, "gate_up", gate_up, "(T, k, 2I)", (*chosen.shape, w_gate_up.shape[1]))
    _between(op, "wanted", wanted, most=15)


def experts_backward_down(
    op: OpSpec,
    grad_out: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    wanted: int,
) -> None:
    """Of ``moe_experts_backward_down``."""
    checks.check_arguments(op, [grad_out, w_down, experts, weights, gate_up])
    _floating(op, "grad_out", grad_out)
    _dims(op, "grad_out", grad_out, "T", "H")
    _dims(op, "w_down", w_down, "E", "H", "I")
    _dims(op, "experts", experts, "T", "k")
    (tokens, hidden), (count, _, inner), top_k = grad_out.shape, w_down.shape, experts.shape[1]
    _expert_count(op, "w_down", w_down, count)
    _shape(op, "w_down", w_down, "(E, H, I)", (count, hidden, inner))
    _shape(op, "experts", experts, "(T, k)", (tokens, top_k))
    _shape(op, "weights", weights, "(T, k)", (tokens, top_k))
    _shape(op, "gate_up", gate_up, "(T, k, 2I)", (tokens, top_k, 2 * inner))
    _dtype(op, "w_down", w_down, grad_out.dtype)
    _dtype(op, "gate_up", gate_up, grad_out.dtype)
    _dtype(op, "experts", experts, torch.int64)
    _floating(op, "weights", weights)
    _countable(op, experts)
    _between(op, "wanted", wanted, most=15)


def experts_backward_gate_up(
    op: OpSpec,
    grad_gate_up: torch.Tensor,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    experts: torch.Tensor,
    wanted: int,
) -> None:
    """Of ``moe_experts_backward_gate_up``."""
    checks.check_arguments(op, [grad_gate_up, x, w_gate_up, experts])
    _floating(op, "x", x)
    _dims(op, "x", x, "T", "H")
    _dims(op, "w_gate_up", w_gate_up, "E", "2I", "H")
    _dims(op, "experts", experts, "T", "k")
    (tokens, hidden), (count, lines, _), top_k = x.shape, w_gate_up.shape, experts.shape[1]
    inner = lines // 2
    _expert_count(op, "w_gate_up", w_gate_up, count)
    _shape(op, "w_gate_up", w_gate_up, "(E, 2I, H)", (count, 2 * inner, hidden))
    _shape(op, "experts", experts, "(T, k)", (tokens, top_k))
    _shape(op, "grad_gate_up", grad_gate_up, "(T * k, 2I)", (tokens * top_k, 2 * inner))
    _dtype(op, "w_gate_up", w_gate_up, x.dtype)
    _dtype(op, "grad_gate_up", grad_gate_up, x.dtype)
    _dtype(op, "experts", experts, torch.int64)
    _countable(op, experts)
    _between(op, "wanted", wanted, most=15)


def _experts(
    op: OpSpec,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    _floating(op, "x", x)
    _dims(op, "x", x, "T", "H")
    _dims(op, "w_down", w_down, "E", "H", "I")
    _dims(op, "experts", experts, "T", "k")
    (tokens, hidden), (count, _, inner), top_k = x.shape, w_down.shape, experts.shape[1]
    _expert_count(op, "w_down", w_down, count)
    _shape(op, "w_gate_up", w_gate_up, "(E, 2I, H)", (count, 2 * inner, hidden))
    _shape(op, "w_down", w_down, "(E, H, I)", (count, hidden, inner))
    _shape(op, "experts", experts, "(T, k)", (tokens, top_k))
    _shape(op, "weights", weights, "(T, k)", (tokens, top_k))
    _dtype(op, "w_gate_up", w_gate_up, x.dtype)
    _dtype(op, "w_down", w_down, x.dtype)
    _dtype(op, "experts", experts, torch.int64)
    _floating(op, "weights", weights)
    _countable(op, experts)


# --- moe_binding.h ------------------------------------------------------------------------------


def _logits(op: OpSpec, router_logits: torch.Tensor) -> None:
    if router_logits.dim() != 2:
        _refuse_shape(op, "router_logits", "2 dims (T, E)", router_logits)
    _floating(op, "router_logits", router_logits)
    _expert_count(op, "router_logits", router_logits, router_logits.shape[1])


def _expert_count(op: OpSpec, argument: str, tensor: torch.Tensor, count: Any) -> None:
    expected = f"from 1 to {MOST_EXPERTS} experts"
    refusal = partial(_refused_shape, op, argument, expected, tensor)
    torch._check(count >= 1, refusal)
    torch._check(count <= MOST_EXPERTS, refusal)


def _countable(op: OpSpec, experts: torch.Tensor) -> None:
    # Of a size that is not known yet the kernel says so: a guard here would be a limit that
    # torch.export wants its user to write.
    if sizes.is_surely_true(experts.numel() >= MOST_ASSIGNMENTS):
        _refuse_shape(op, "experts", "fewer than 2^31 elements", experts)


def _dims(op: OpSpec, argument: str, tensor: torch.Tensor, *dims: str) -> None:
    if tensor.dim() != len(dims):
        _refuse_shape(op, argument, f"{len(dims)} dims ({', '.join(dims)})", tensor)


def _shape(
    op: OpSpec, argument: str, tensor: torch.Tensor, dims: str, expected: Sequence[Any]
) -> None:
    text = f"shape {dims} = {sizes.shape_name(expected)}"
    if tensor.dim() != len(expected):
        _refuse_shape(op, argument, text, tensor)
    for size, wanted in zip(tensor.shape, expected, strict=True):
        torch._check(size == wanted, partial(_refused_shape, op, argument, text, tensor))


def _dtype(op: OpSpec, argument: str, tensor: torch.Tensor, expected: torch.dtype) -> None:
    if tensor.dtype is not expected:
        wanted = f"dtype {checks.dtype_name(expected)}"
        checks.refuse(op, argument, wanted, checks.dtype_name(tensor.dtype))


def _floating(op: OpSpec, argument: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _FLOATING:
        wanted = "dtype float64, float32, float16 or bfloat16"
        checks.refuse(op, argument, wanted, checks.dtype_name(tensor.dtype))


def _between(op: OpSpec, argument: str, value: int, *, most: int, least: int = 0) -> None:
    torch._check(
        least <= value <= most,
        lambda: checks.refusal(op, argument, f"from {least} to {most}", str(value)),
    )


def _refused_shape(op: OpSpec, argument: str, expected: str, tensor: torch.Tensor) -> str:
    return checks.refusal(op, argument, expected, f"shape {sizes.shape_name(tensor.shape)}")


def _refuse_shape(op: OpSpec, argument: str, expected: str, tensor: torch.Tensor) -> None:
    raise RuntimeError(_refused_shape(op, argument, expected, tensor))
