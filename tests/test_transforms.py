"""Every operator under torch.func, under modes of functions, in forward mode, and differentiated
twice.

There is no list of names here: an operator that is added is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shipped import (
    FORWARD,
    OPERATORS,
    TORCH,
    by_each_name,
    call_with,
    differentiated,
    each_differentiable,
    function_of,
    gradients,
    public,
    tensors,
    total,
)
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import cuda_ops
from cuda_ops.derive.no_gradient import NoGradient
from cuda_ops.registry import all_operators
from cuda_ops.testing.compare import outputs
from cuda_ops.testing.tolerance import is_floating


@by_each_name
@each_differentiable
def test_func_grad_agrees_with_autograd(name: str, called: str) -> None:
    function, arguments = function_of(name, called), call_with(name)
    positions = differentiated(name, arguments)

    def loss(*values: Any) -> torch.Tensor:
        return total(function(*values))

    actual = torch.func.grad(loss, argnums=positions)(*arguments)
    for one, expected in zip(actual, gradients(function, arguments, positions), strict=True):
        torch.testing.assert_close(one, expected)


@by_each_name
@each_differentiable
def test_what_vjp_returns_outlives_the_transform(name: str, called: str) -> None:
    function, arguments = function_of(name, called), call_with(name)
    positions = differentiated(name, arguments)

    def loss(*values: Any) -> torch.Tensor:
        given = dict(zip(positions, values, strict=True))
        return total(function(*(given.get(i, value) for i, value in enumerate(arguments))))

    result, pull = torch.func.vjp(loss, *(arguments[i] for i in positions))
    for actual, expected in zip(
        pull(torch.ones_like(result)), gradients(function, arguments, positions), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@by_each_name
@each_differentiable
@pytest.mark.quick(10)
def test_gradients_per_sample(name: str, called: str) -> None:
    function = function_of(name, called)
    calls = [call_with(name, seed=seed) for seed in range(3)]

    def loss(*values: Any) -> torch.Tensor:
        return total(function(*values))

    mapped = [torch.is_tensor(value) for value in calls[0]]
    stacked = [
        torch.stack([c[i] for c in calls]) if mapped[i] else value
        for i, value in enumerate(calls[0])
    ]
    in_dims = tuple(0 if one else None for one in mapped)
    positions = differentiated(name, calls[0])
    per_sample = torch.vmap(torch.func.grad(loss, argnums=positions), in_dims=in_dims)(*stacked)
    for k, actual in enumerate(per_sample):
        expected = torch.stack([gradients(function, c, positions)[k] for c in calls])
        # Samples that are mapped together may be added up in another order.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@each_differentiable
def test_several_gradients_at_once(name: str) -> None:
    """``torch.autograd.functional.jacobian(..., vectorize=True)`` asks for them like this."""
    function, arguments = public(name), call_with(name)
    wanted = [arguments[i].requires_grad_() for i in differentiated(name, arguments)]
    results = [r for r in outputs(function(*arguments)) if r.requires_grad]
    rows = [torch.randn(3, *r.shape, dtype=r.dtype, device=r.device) for r in results]
    each = [
        torch.autograd.grad(results, wanted, [r[i] for r in rows], retain_graph=True)
        for i in range(3)
    ]
    together = torch.autograd.grad(results, wanted, rows, is_grads_batched=True)
    for actual, expected in zip(together, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(expected))


class Calls(TorchFunctionMode):
    """Records the functions of cuda_ops that are called while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if isinstance(function, torch._ops.OpOverload) and function.namespace == "cuda_ops":
            self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n in OPERATORS if n != "moe_route_map"])  # integers
def test_function_modes_see_it(name: str) -> None:
    """They see torch's own too: tools that cast, count or quantize are such modes."""
    arguments = call_with(name)
    with Calls() as calls:
        public(name)(*arguments)
    assert calls.seen


@by_each_name
@each_differentiable
@pytest.mark.quick(4)
def test_forward_mode_is_right_or_refused_and_not_forgotten(name: str, called: str) -> None:
    function, arguments = function_of(name, called), call_with(name)
    first = differentiated(name, arguments)[0]
    if has_forward_mode(name, first):
        expected = numeric_tangents(name, function, arguments, first)
        with forward_ad.dual_level():
            arguments[first] = forward_ad.make_dual(arguments[first], arguments[first])
            found = [forward_ad.unpack_dual(out).tangent for out in tensors(function(*arguments))]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return
    with forward_ad.dual_level():
        function(*arguments)  # nothing has a tangent
        arguments[first] = forward_ad.make_dual(arguments[first], arguments[first])
        if all_operators()[name].spec.is_composite and not all_operators()[name].spec.calls:
            assert forward_ad.unpack_dual(function(*arguments)).tangent is not None  # torch's own
            return
        if OPERATORS[name].spec.is_composite and called != "cuda_ops":  # C++ calls a part
            with pytest.raises(RuntimeError, match=r"failed to run cuda_ops::\w+"):
                function(*arguments)
            return
        with pytest.raises(NotImplementedError, match=r"cuda_ops::\w+: argument '\w+': .* tangent"):
            function(*arguments)


def has_forward_mode(name: str, argument: int) -> bool:
    derivative = all_operators()[name].now.forward
    return derivative is not None and argument in derivative.inputs


def numeric_tangents(
    name: str, function: Callable[..., Any], arguments: list[Any], along: int
) -> list[torch.Tensor]:
    """Returns differences of results in float64, where an argument moves along itself: the result
    itself where the operator is linear in it.
    """
    op = all_operators()[name].spec
    if op.argument_names[along] in op.linear:
        return tensors(function(*arguments))
    wide = [value.double() if is_floating(value) else value for value in arguments]
    ends = []
    for factor in (1 + 1e-6, 1 - 1e-6):
        moved = [*wide[:along], wide[along] * factor, *wide[along + 1 :]]
        ends.append(tensors(function(*moved)))
    dtype = arguments[along].dtype
    return [((a - b) / 2e-6).to(dtype) for a, b in zip(*ends, strict=True)]


def test_forward_mode_is_refused_by_the_dispatcher_too() -> None:
    """torch drops the tangent of an operator of torch.library where no gradient is wanted, and that
    of its own operators in inference mode alone.
    """
    for gradient in (False, True):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), forward_ad.dual_level():
                x = torch.ones(3, requires_grad=gradient)
                dual = forward_ad.make_dual(x, torch.ones(3))
                assert forward_ad.unpack_dual(torch.nn.functional.silu(dual)).tangent is not None
                for arguments in ((dual, x), (x, dual)):
                    with pytest.raises(
                        NotImplementedError, match=r"::rms_norm: argument '\w+': .* tang"
                    ):
                        torch.ops.cuda_ops.rms_norm(*arguments)
                torch.ops.cuda_ops.rms_norm(x, x)


@by_each_name
@each_differentiable
def test_torch_func_jvp_is_right_or_refused_by_name(name: str, called: str) -> None:
    function, arguments = function_of(name, called), call_with(name)
    first = differentiated(name, arguments)[0]

    def along(value: torch.Tensor) -> Any:
        return function(*arguments[:first], value, *arguments[first + 1 :])

    value, spec = (arguments[first],), OPERATORS[name].spec
    if has_forward_mode(name, first):
        found = tensors(torch.func.jvp(along, value, value)[1])
        expected = numeric_tangents(name, function, arguments, first)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return
    if spec.is_composite and not spec.calls:
        assert tensors(torch.func.jvp(along, value, value)[1])[0].any()  # torch's own
        return
    # C++ that calls a part learns from torch 2.13 on why it was refused.
    text = "failed to run" if spec.is_composite and called != "cuda_ops" else "expected no tangent"
    with pytest.raises(RuntimeError, match=rf"(?s)cuda_ops::\w+.*{text}|{text} cuda_ops::\w+"):
        torch.func.jvp(along, value, value)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("silu_and_mul", [()]),
        ("sum_rows", [()]),
        ("rgb_to_gray", [(2,)]),
        ("normalize_volume", [(4, 4)]),
        ("fused_linear_gelu", [(), (2, 1)]),
    ],
)
def test_vmap_takes_no_mapped_dim_for_one_of_a_row(name: str, shapes: list[Any]) -> None:
    """What is refused for one example is refused for several."""
    spec = OPERATORS[name].spec
    tensors = [torch.ones(5, *shape).to(spec.dtypes[0]) for shape in shapes]
    rest = call_with(name)[len(tensors) :]
    for function in (function_of(name, "cuda_ops"), function_of(name, "torch.ops.cuda_ops")):
        with pytest.raises(RuntimeError, match=f"::{name}: argument '.*': expected .* dims"):
            function(*(t[0] for t in tensors), *rest)
        with pytest.raises(RuntimeError, match=f"::{name}: argument '.*': expected .* dims"):
            torch.vmap(lambda *t, call=function: call(*t, *rest))(*tensors)


def test_vmap_takes_no_dtype_that_one_example_has_not() -> None:
    """The operator has a rule of its own."""
    with pytest.raises(RuntimeError, match=r"argument 'x': expected dtype .* got int64"):
        torch.vmap(cuda_ops.reduce_sum)(torch.ones(3, 4, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by torch
@each_differentiable
@pytest.mark.quick(2)
def test_compiled_autograd_traces_the_gradient(name: str) -> None:
    arguments = call_with(name)
    positions = differentiated(name, arguments)
    expected = gradients(public(name), arguments, positions)
    leaves = [arguments[i].detach().requires_grad_() for i in positions]
    for i, leaf in zip(positions, leaves, strict=True):
        arguments[i] = leaf
    loss = total(public(name)(*arguments))
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    for leaf, one in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, one)


# --- gradients of gradients -------------------------------------------------------------------

#: What a caller may differentiate twice with torch's own operators.
each_of_torchs = pytest.mark.parametrize("name", [name for name in TORCH if name in FORWARD])


@each_of_torchs
@pytest.mark.quick(3)
def test_the_second_derivative_is_right(name: str) -> None:
    arguments = call_with(name, dtype=torch.float64)
    leaves = [a.requires_grad_() if is_floating(a) else a for a in arguments]
    assert torch.autograd.gradgradcheck(getattr(cuda_ops, name), leaves)


def refuses(name: str) -> bool:
    """Tells whether an operator refuses gradients though arguments and results are floating."""
    autograd = OPERATORS[name].now.autograd
    refused = autograd is not None and isinstance(autograd.backward, NoGradient)
    return refused and name != "moe_route_map"  # integers


@pytest.mark.parametrize("name", [n for n in OPERATORS if refuses(n)])
@pytest.mark.quick(2)
def test_what_has_no_gradient_compiles_until_one_is_asked_for(name: str) -> None:
    arguments = call_with(name)
    function = OPERATORS[name].public
    expected = tensors(function(*arguments))
    for argument in arguments:
        if is_floating(argument):
            argument.requires_grad_()
    reason = f"^cuda_ops::{name} has no gradient"
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for run in (function, compiled):
        results = tensors(run(*arguments))
        torch.testing.assert_close([r.detach() for r in results], expected)
        ends = [result for result in results if result.requires_grad]
        seeds = [torch.ones_like(end) for end in ends]
        with pytest.raises(RuntimeError, match=reason):
            torch.autograd.backward(ends, seeds)


def curvature(function: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
    """How the squares of the gradients change with each argument."""

    def squares(*values: Any) -> torch.Tensor:
        grads = torch.func.grad(lambda *v: total(function(*v)), argnums=positions)(*values)
        # The gradient of a linear function is constant; times the values something is left of it.
        weights = [values[i] for i in positions]
        return torch.stack([(g**2 * w).sum() for g, w in zip(grads, weights, strict=True)]).sum()

    return torch.func.grad(squares, argnums=positions)


@each_of_torchs
@pytest.mark.quick(2)
def test_the_second_derivative_transforms_and_compiles_as_torchs(name: str) -> None:
    arguments = call_with(name)
    positions = differentiated(name, arguments)
    expected = curvature(TORCH[name], positions)(*arguments)
    ours = curvature(getattr(cuda_ops, name), positions)
    torch.testing.assert_close(ours(*arguments), expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()  # torch compiles one function, its own wrapper here, a few times only
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), expected, rtol=1e-4, atol=1e-4)
    in_dims = tuple(0 if torch.is_tensor(a) else None for a in arguments)
    stacked = [torch.stack([a, a]) if torch.is_tensor(a) else a for a in arguments]
    for mapped, one in zip(torch.vmap(ours, in_dims)(*stacked), expected, strict=True):
        torch.testing.assert_close(mapped, torch.stack([one, one]), rtol=1e-4, atol=1e-4)
