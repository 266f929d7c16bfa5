"""The operators of this checkout, what torch says of them, and how tests call each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cuda_ops
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.build.source_text import Kind
from cuda_ops.compile_ops import compile_ops
from cuda_ops.derive.no_gradient import NoGradient
from cuda_ops.dispatch.lists import has_lists
from cuda_ops.dispatch.operator import Operator
from cuda_ops.registry import all_operators, registry
from cuda_ops.testing.arguments import in_order
from cuda_ops.testing.draw import Draw, chosen
from cuda_ops.testing.samples import MAX_NUMEL
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.subject import subject_of
from cuda_ops.testing.tolerance import is_floating


def _shipped() -> dict[str, Operator]:
    """The operators of this checkout, built if need be."""
    stems = [
        pair.stem
        for pair in registry().pairs().values()
        if pair.root == BUILTIN_ROOT and pair.kind is Kind.NATIVE
    ]
    for row in compile_ops(stems):
        assert not row.error, row.error
    found = all_operators(lambda pair: pair.root == BUILTIN_ROOT)
    # Tests of all operators pass tensors; those that take lists have tests of their own.
    return {name: operator for name, operator in found.items() if not has_lists(operator.spec)}


OPERATORS = _shipped()
#: Those that a caller uses; the others are their gradients.
FORWARD = {n: o for n, o in OPERATORS.items() if not n.endswith("_backward")}
each = pytest.mark.parametrize("name", OPERATORS)

#: What torch itself computes, for operators that have a counterpart there.
TORCH: dict[str, Callable[..., Any]] = {
    "silu": F.silu,
    # aten's own silu_backward is not differentiable.
    "silu_backward": lambda g, x: g * torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x))),
    "gelu_approx_backward": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "matmul": torch.matmul,
    "silu_and_mul": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "gelu_approx": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_backward": lambda grad_out, out: torch.ops.aten.threshold_backward(grad_out, out, 0),
    "add": torch.add,
    "fused_relu_scale": lambda x, alpha: F.relu(x) * alpha,
    "scale_relu": lambda x, scale: F.relu(x * scale + 1),
    "sum_rows": lambda x: x.sum(-1),
    "reduce_sum": torch.sum,
}


def call_with(name: str, dtype: torch.dtype | None = None, seed: int = 0) -> list[Any]:
    """Returns arguments that fit the signature line, or that its plugin draws."""
    spec = OPERATORS[name].spec
    # A line says nothing about values, and which optional tensors have a gradient.
    optional = any("Optional[Tensor]" in str(argument.type) for argument in spec.parsed.arguments)
    if (spec.signature is not None and not optional) or len(spec.tensor_positions) == 1:
        return list(shaped(spec, (3, 4), dtype=dtype, seed=seed).make())
    draw = Draw(20, range(2, MAX_NUMEL), dtype or torch.float32)
    sample = chosen(subject_of(spec, registry().plugins), draw)[-1]
    return list(replace(sample, seed=seed).make())


def differentiated(name: str, arguments: list[Any]) -> tuple[int, ...]:
    """Returns the positions of the arguments that have a gradient."""
    spec = OPERATORS[name].spec
    names = zip(spec.argument_names, arguments, strict=False)
    return tuple(
        i for i, (one, value) in enumerate(names)
        if is_floating(value) and one not in spec.no_gradient
    )  # fmt: skip


def public(name: str) -> Callable[..., Any]:
    """Returns the public function by the schema's positions; it may fill in all but tensors."""
    function: Callable[..., Any] = getattr(cuda_ops, name)
    names = OPERATORS[name].spec.argument_names
    parameters = inspect.signature(function).parameters
    if tuple(parameters) == names:
        return in_order(OPERATORS[name].spec, function)

    def call(*values: Any) -> Any:
        given = dict(zip(names, values, strict=False))
        return function(**{
            name: given[name]
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty or torch.is_tensor(given.get(name))
        })  # fmt: skip

    return call


#: Both names of an operator: what callers use, and what exported graphs and other libraries do.
by_each_name = pytest.mark.parametrize("called", ["cuda_ops", "torch.ops.cuda_ops"])


def function_of(name: str, called: str) -> Callable[..., Any]:
    packet: Callable[..., Any] = getattr(torch.ops.cuda_ops, name)
    return public(name) if called == "cuda_ops" else in_order(OPERATORS[name].spec, packet)


def tensors(values: Any) -> list[torch.Tensor]:
    values = values if isinstance(values, (tuple, list)) else [values]
    return [value for value in values if isinstance(value, torch.Tensor)]


def total(result: Any) -> torch.Tensor:
    """Returns a number that depends on every element and its place."""
    parts = [
        (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum() for out in tensors(result)
    ]
    return torch.stack(parts).sum()


def differentiable(name: str) -> bool:
    operator = OPERATORS[name]
    autograd = operator.now.autograd
    return operator.spec.is_composite or (
        autograd is not None and not isinstance(autograd.backward, NoGradient)
    )


each_differentiable = pytest.mark.parametrize("name", [n for n in FORWARD if differentiable(n)])


def gradients(
    function: Callable[..., Any], arguments: list[Any], positions: Sequence[int]
) -> list[torch.Tensor]:
    """Returns those of the arguments at these positions."""
    given = list(arguments)
    for i in positions:
        given[i] = given[i].detach().clone().requires_grad_()
    return list(torch.autograd.grad(total(function(*given)), [given[i] for i in positions]))
