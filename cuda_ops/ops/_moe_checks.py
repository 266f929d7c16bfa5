"""Checks of a mixture of experts that no binding can declare.

``cuda_ops.moe`` alone sees both the logits and the matrices; an index map counts its choices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from cuda_ops.derive import checks, sizes
from cuda_ops.spec import OpSpec

#: The limits of ``moe.h``.
MOST_EXPERTS, MOST_CHOSEN, MOST_ASSIGNMENTS, MOST_PARTS = 512, 16, 2**31, 16
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def mixture(
    op: OpSpec,
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: Any,
) -> None:
    """Checks the arguments of ``cuda_ops.moe`` that its parts cannot compare, or would name as
    arguments that the caller did not give. Its parts check the rest.
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
    # The parts check sizes that have no value yet: torch.compile takes no check with its own text
    # here. Elsewhere tuples are compared, whose sizes are tensors while torch.jit traces.
    compare = sizes.may_be_equal if torch.compiler.is_compiling() else operator.eq
    if not compare(router_logits.shape, expected):
        wanted = f"shape (..., E) = {sizes.shape_name(expected)}"
        _refuse_shape(op, "router_logits", wanted, router_logits)
    tokens: Any = math.prod(x.shape[:-1])  # or a tensor
    numbers = isinstance(tokens, int) and isinstance(top_k, int)
    if numbers and sizes.is_surely_true(tokens * top_k >= MOST_ASSIGNMENTS):
        wanted = "fewer than 2^31 choices of all tokens together"
        checks.refuse(op, "top_k", wanted, f"{top_k} of each of {tokens} tokens")


def matrices(w_gate_up: torch.Tensor, w_down: torch.Tensor, hidden: int, of: str = "") -> None:
    """Checks the shapes of both matrices of 3 dims; ``of`` says for the text whose E it is."""
    count, _, inner = w_down.shape
    for name, matrix, dims, shape in (
        ("w_gate_up", w_gate_up, "(E, 2I, H)", [count, 2 * inner, hidden]),
        ("w_down", w_down, "(E, H, I)", [count, hidden, inner]),
    ):
        if list(matrix.shape) != shape:
            refuse(name, f"shape {dims} = {shape}{of}", f"shape {list(matrix.shape)}")


def refuse(argument: str, expected: str, actual: str) -> None:
    """Raises what ``cuda_ops.moe`` says of an argument, where its declaration is out of reach."""
    raise RuntimeError(f"cuda_ops::moe: argument '{argument}': expected {expected}, got {actual}")


def into(
    op: OpSpec,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    outs: Sequence[torch.Tensor],
) -> None:
    """Checks what the binding of ``moe_experts_into_`` does: no signature line describes lists."""
    like_x = {"w_gate_up": w_gate_up, "w_down": w_down}
    like_x |= {f"outs[{i}]": out for i, out in enumerate(outs)}
    for name, tensor in {"x": x, "weights": weights}.items():
        if tensor.dtype not in FLOATING:
            _refuse_dtype(op, name, checks.dtypes_text(FLOATING), tensor)
    for name, tensor in like_x.items():
        if tensor.dtype != x.dtype:
            _refuse_dtype(op, name, f"{checks.dtype_name(x.dtype)} like 'x'", tensor)
    if experts.dtype != torch.int64:
        _refuse_dtype(op, "experts", "int64", experts)
    for name, tensor, dims in (("x", x, 2), ("w_down", w_down, 3), ("experts", experts, 2)):
        if tensor.dim() != dims:
            _refuse_shape(op, name, f"{dims} dims", tensor)
    (tokens, hidden), (count, _, inner) = x.shape, w_down.shape
    if not 1 <= count <= MOST_EXPERTS:
        checks.refuse(op, "w_down", f"1 to {MOST_EXPERTS} experts", str(count))
    if not 1 <= len(outs) <= MOST_PARTS or tokens % len(outs):
        wanted = f"1 to {MOST_PARTS} tensors that share out the {tokens} rows of 'x'"
        checks.refuse(op, "outs", wanted, str(len(outs)))
    shapes = {
        "w_down": (w_down, (count, hidden, inner)),
        "w_gate_up": (w_gate_up, (count, 2 * inner, hidden)),
        "experts": (experts, (tokens, experts.shape[1])),
        "weights": (weights, (tokens, experts.shape[1])),
    }
    for i, out in enumerate(outs):
        shapes[f"outs[{i}]"] = out, (tokens // len(outs), hidden)
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            _refuse_shape(op, name, f"shape {sizes.shape_name(shape)}", tensor)
    for i, out in enumerate(outs):
        if not out.is_contiguous():
            checks.refuse(op, f"outs[{i}]", "a contiguous tensor", "one that is not")


def _refuse_dtype(op: OpSpec, argument: str, expected: str, tensor: torch.Tensor) -> None:
    checks.refuse(op, argument, f"dtype {expected}", checks.dtype_name(tensor.dtype))


def countable(op: OpSpec, experts: torch.Tensor) -> None:
    """Checks what ``contiguous_choice`` of ``moe_binding.h`` does."""
    # The kernel checks a size that has no value yet: a guard here would be a limit that
    # torch.export wants its user to write.
    if sizes.is_surely_true(experts.numel() >= MOST_ASSIGNMENTS):
        _refuse_shape(op, "experts", "fewer than 2^31 elements", experts)


def _refuse_shape(op: OpSpec, argument: str, expected: str, tensor: torch.Tensor) -> None:
    checks.refuse(op, argument, expected, f"shape {sizes.shape_name(tensor.shape)}")
