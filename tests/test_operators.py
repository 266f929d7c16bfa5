"""Every operator there is, through its public function, on the CPU and against what torch says.

There is no list of names here: an operator that is added is tested.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import cuda_ops
from cuda_ops.dev import compile_ops
from cuda_ops.discovery import BUILTIN_ROOT, Kind
from cuda_ops.no_gradient import NoGradient
from cuda_ops.operator import Operator
from cuda_ops.registry import all_operators, registry
from cuda_ops.testing import PROFILES, check_op
from cuda_ops.testing.case import Case
from cuda_ops.testing.child import Worker
from cuda_ops.testing.compare import is_floating, outputs
from cuda_ops.testing.draw import Draw, chosen
from cuda_ops.testing.samples import MAX_NUMEL, TensorArg, shaped
from cuda_ops.testing.subject import subject_of


def _shipped() -> dict[str, Operator]:
    """The operators of this checkout, built if need be."""
    stems = [
        pair.stem
        for pair in registry().pairs().values()
        if pair.root == BUILTIN_ROOT and pair.kind is Kind.NATIVE
    ]
    for row in compile_ops(stems):
        assert not row.error, row.error
    return all_operators(lambda pair: pair.root == BUILTIN_ROOT)


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
    """Arguments that fit the signature line, or that its plugin draws."""
    spec = OPERATORS[name].spec
    if spec.signature is not None or len(spec.tensor_positions) == 1:
        return list(shaped(spec, (3, 4), dtype=dtype, seed=seed).make())
    draw = Draw(20, range(2, MAX_NUMEL), dtype or torch.float32)
    sample = chosen(subject_of(spec, registry().plugins), draw)[-1]
    return list(replace(sample, seed=seed).make())


def floating(arguments: list[Any]) -> tuple[int, ...]:
    """Positions of the arguments that may have a gradient."""
    return tuple(i for i, value in enumerate(arguments) if is_floating(value))


def public(name: str) -> Callable[..., Any]:
    """The public function, by the positions of the schema; what is no tensor may be left to it."""
    function: Callable[..., Any] = getattr(cuda_ops, name)
    names = OPERATORS[name].spec.argument_names
    parameters = inspect.signature(function).parameters
    if tuple(parameters) == names:
        return function

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
    return public(name) if called == "cuda_ops" else packet


def tensors(values: Any) -> list[torch.Tensor]:
    values = values if isinstance(values, (tuple, list)) else [values]
    return [value for value in values if isinstance(value, torch.Tensor)]


def total(result: Any) -> torch.Tensor:
    """A number that depends on every element, and on which is where."""
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


def gradients(function: Callable[..., Any], arguments: list[Any]) -> list[torch.Tensor]:
    leaves = [a.detach().clone().requires_grad_() if is_floating(a) else a for a in arguments]
    return list(
        torch.autograd.grad(total(function(*leaves)), [a for a in leaves if is_floating(a)])
    )


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(PROFILES["ci"].timeout) as worker:
        yield worker


def test_operators_were_found() -> None:
    assert FORWARD and set(TORCH) <= set(OPERATORS)


@each
def test_every_check_passes(
    name: str, worker: Worker, record_property: Callable[[str, object], None]
) -> None:
    report = check_op(name, profile=PROFILES["ci"], isolate=worker)
    record_property("cuda_ops_report", json.dumps(report.as_json()))
    assert report.passed, str(report)


@each
def test_calls_for_the_sanitizer_are_few_and_small(name: str) -> None:
    subject = subject_of(OPERATORS[name].spec, registry().plugins)
    assert len(subject.kernel_samples) <= 20
    for sample in subject.kernel_samples:
        assert sample.numel < 1 << 24
        case = Case(subject, "meta", sample)
        case.call(*(
            torch.empty(arg.shape, dtype=arg.dtype, device="meta")
            if isinstance(arg, TensorArg) else arg
            for arg in sample.args
        ))  # fmt: skip


@by_each_name
@pytest.mark.parametrize("name", [n for n, o in OPERATORS.items() if not o.spec.is_composite])
def test_a_sparse_argument_is_refused_by_name(name: str, called: str) -> None:
    arguments = call_with(name)
    position = max(i for i, value in enumerate(arguments) if torch.is_tensor(value))
    shape, dtype = arguments[position].shape, arguments[position].dtype
    nothing = torch.zeros(len(shape), 0, dtype=torch.int64), torch.zeros(0, dtype=dtype)
    arguments[position] = torch.sparse_coo_tensor(*nothing, shape, check_invariants=True)
    argument = OPERATORS[name].spec.argument_names[position]
    with pytest.raises(RuntimeError, match=f"::{name}: argument '{argument}': expected a strided"):
        function_of(name, called)(*arguments)


@each
def test_the_public_function_is_documented_and_named(name: str) -> None:
    function = getattr(cuda_ops, name)
    assert function is OPERATORS[name].public
    assert function.__name__ == name and function.__module__ == "cuda_ops"
    for section in ("Shapes:", "Dtypes:", "Errors:", "Formula:"):
        assert section in function.__doc__


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", TORCH)
def test_the_result_and_gradient_are_torchs(name: str, dtype: torch.dtype) -> None:
    arguments = call_with(name, dtype=dtype)
    function, expected = getattr(cuda_ops, name), TORCH[name]
    # Composed operators round after each step, torch's own too: a few units in the last place.
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(function(*arguments), expected(*arguments), **tolerance)
    if differentiable(name) and dtype in (torch.float32, torch.float64):
        for actual, wanted in zip(
            gradients(function, arguments), gradients(expected, arguments), strict=True
        ):
            tolerance["atol"] = float(8 * torch.finfo(dtype).eps * wanted.abs().max())
            torch.testing.assert_close(actual, wanted, **tolerance)


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    small = torch.tensor(1e-4, dtype=torch.float16)
    assert cuda_ops.scale_relu(small, 1e5) == 11  # 1e5 is no float16
    several = torch.vmap(lambda one: cuda_ops.scale_relu(one, 1e5))(small.expand(3))
    assert torch.equal(several, cuda_ops.scale_relu(small.expand(3), 1e5))
    x = torch.tensor([-1.0, 0, 2])
    for alpha in (1e300, 1e39, 1e-50):
        expected = F.relu(x) * torch.tensor(alpha, dtype=torch.float32)
        torch.testing.assert_close(cuda_ops.fused_relu_scale(x, alpha), expected, equal_nan=True)


# --- transforms ----------------------------------------------------------------------------


@by_each_name
@each_differentiable
def test_func_grad_agrees_with_autograd(name: str, called: str) -> None:
    function, arguments = function_of(name, called), call_with(name)
    positions = floating(arguments)

    def loss(*values: Any) -> torch.Tensor:
        return total(function(*values))

    actual = torch.func.grad(loss, argnums=positions)(*arguments)
    for one, expected in zip(actual, gradients(function, arguments), strict=True):
        torch.testing.assert_close(one, expected)


@by_each_name
@each_differentiable
def test_what_vjp_returns_outlives_the_transform(name: str, called: str) -> None:
    function, arguments = function_of(name, called), call_with(name)
    positions = floating(arguments)

    def loss(*values: Any) -> torch.Tensor:
        given = dict(zip(positions, values, strict=True))
        return total(function(*(given.get(i, value) for i, value in enumerate(arguments))))

    result, pull = torch.func.vjp(loss, *(arguments[i] for i in positions))
    for actual, expected in zip(
        pull(torch.ones_like(result)), gradients(function, arguments), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@by_each_name
@each_differentiable
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
    positions = floating(calls[0])
    per_sample = torch.vmap(torch.func.grad(loss, argnums=positions), in_dims=in_dims)(*stacked)
    for k, actual in enumerate(per_sample):
        expected = torch.stack([gradients(function, c)[k] for c in calls])
        torch.testing.assert_close(actual, expected)


@each_differentiable
def test_several_gradients_at_once(name: str) -> None:
    """As ``torch.autograd.functional.jacobian(..., vectorize=True)`` asks for them."""
    function, arguments = public(name), call_with(name)
    leaves = [a.requires_grad_() if is_floating(a) else a for a in arguments]
    wanted = [leaf for leaf in leaves if is_floating(leaf)]
    results = [r for r in outputs(function(*leaves)) if r.requires_grad]
    rows = [torch.randn(3, *r.shape, dtype=r.dtype, device=r.device) for r in results]
    each = [
        torch.autograd.grad(results, wanted, [r[i] for r in rows], retain_graph=True)
        for i in range(3)
    ]
    together = torch.autograd.grad(results, wanted, rows, is_grads_batched=True)
    for actual, expected in zip(together, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(expected))


class Calls(TorchFunctionMode):
    """The functions of cuda_ops that are called while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if isinstance(function, torch._ops.OpOverload) and function.namespace == "cuda_ops":
            self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n in OPERATORS if n != "moe_route_map"])  # of integers
def test_function_modes_see_it(name: str) -> None:
    """As they see torch's own: tools that cast, count or quantize are such modes."""
    arguments = call_with(name)
    with Calls() as calls:
        public(name)(*arguments)
    assert calls.seen


@each_differentiable
def test_forward_mode_is_refused_and_not_forgotten(name: str) -> None:
    function, arguments = public(name), call_with(name)
    first = floating(arguments)[0]
    with forward_ad.dual_level():
        function(*arguments)  # nothing has a tangent
        arguments[first] = forward_ad.make_dual(arguments[first], arguments[first])
        if all_operators()[name].spec.is_composite and not all_operators()[name].spec.calls:
            assert forward_ad.unpack_dual(function(*arguments)).tangent is not None  # torch's own
            return
        with pytest.raises(NotImplementedError, match=r"cuda_ops::\w+: argument '\w+': .* tangent"):
            function(*arguments)


@by_each_name
@each_differentiable
def test_torch_func_jvp_is_refused_by_name(name: str, called: str) -> None:
    function, arguments = function_of(name, called), call_with(name)
    first = floating(arguments)[0]

    def along(value: torch.Tensor) -> Any:
        return function(*arguments[:first], value, *arguments[first + 1 :])

    value, spec = (arguments[first],), OPERATORS[name].spec
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


# --- gradients of gradients -------------------------------------------------------------------

#: What a caller may differentiate twice with torch's own operators.
each_of_torchs = pytest.mark.parametrize("name", [name for name in TORCH if name in FORWARD])


@each_of_torchs
def test_the_second_derivative_is_right(name: str) -> None:
    arguments = call_with(name, dtype=torch.float64)
    leaves = [a.requires_grad_() if is_floating(a) else a for a in arguments]
    assert torch.autograd.gradgradcheck(getattr(cuda_ops, name), leaves)


def refuses(name: str) -> bool:
    """Whether a gradient is asked for in vain, of floating arguments and results."""
    autograd = OPERATORS[name].now.autograd
    refused = autograd is not None and isinstance(autograd.backward, NoGradient)
    return refused and name != "moe_route_map"  # of integers


@pytest.mark.parametrize("name", [n for n in OPERATORS if refuses(n)])
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


def curvature(function: Callable[..., Any], arguments: list[Any]) -> Callable[..., Any]:
    """How the squares of the gradients change with each argument."""
    positions = floating(arguments)

    def squares(*values: Any) -> torch.Tensor:
        grads = torch.func.grad(lambda *v: total(function(*v)), argnums=positions)(*values)
        # The gradient of a linear function is constant; times the values something is left of it.
        weights = [values[i] for i in positions]
        return torch.stack([(g**2 * w).sum() for g, w in zip(grads, weights, strict=True)]).sum()

    return torch.func.grad(squares, argnums=positions)


@each_of_torchs
def test_the_second_derivative_transforms_and_compiles_as_torchs(name: str) -> None:
    arguments = call_with(name)
    expected = curvature(TORCH[name], arguments)(*arguments)
    ours = curvature(getattr(cuda_ops, name), arguments)
    torch.testing.assert_close(ours(*arguments), expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()  # torch compiles one function, its own wrapper here, a few times only
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), expected, rtol=1e-4, atol=1e-4)
    in_dims = tuple(0 if torch.is_tensor(a) else None for a in arguments)
    stacked = [torch.stack([a, a]) if torch.is_tensor(a) else a for a in arguments]
    for mapped, one in zip(torch.vmap(ours, in_dims)(*stacked), expected, strict=True):
        torch.testing.assert_close(mapped, torch.stack([one, one]), rtol=1e-4, atol=1e-4)


# --- autocast ---------------------------------------------------------------------------------


SHARDED = """
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
IMPORTS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
mesh = init_device_mesh("cpu", (2,))
x = DTensor.from_local(torch.randn(4, 3), mesh, [Shard(0)], run_check=False)
assert cuda_ops.silu(x).placements == (Shard(0),)
"""


@pytest.mark.parametrize("first", ["torch.distributed.tensor", "cuda_ops"])
def test_sharding_is_known_whichever_is_imported_first(first: str) -> None:
    lines = ["import torch.distributed.tensor", "import cuda_ops; cuda_ops.silu"]
    imports = "\n".join(lines if first != "cuda_ops" else lines[::-1])
    done = subprocess.run(
        [sys.executable, "-c", SHARDED.replace("IMPORTS", imports)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
def test_autocast_of_a_residual_sum_follows_torch(lower: torch.dtype) -> None:
    residual = torch.randn(3, 4, requires_grad=True)
    result = torch.randn(3, 4, dtype=lower, requires_grad=True)
    with torch.autocast("cpu", dtype=lower):
        ours, theirs = cuda_ops.add(residual, result), torch.add(residual, result)
        assert cuda_ops.add(result, result).dtype is lower
    assert ours.dtype is torch.float32
    assert torch.equal(ours, theirs)
    gradients = torch.autograd.grad(ours.sum(), [residual, result])
    assert [gradient.dtype for gradient in gradients] == [torch.float32, lower]
    with pytest.raises(RuntimeError, match="cuda_ops::add"):
        cuda_ops.add(residual, result)


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
def test_autocast_promotes_two_half_types_as_torch(lower: torch.dtype) -> None:
    a, b = torch.randn(4).half(), torch.randn(4).bfloat16()
    with torch.autocast("cpu", dtype=lower):
        ours, theirs = cuda_ops.add(a, b), torch.add(a, b)
    assert ours.dtype is theirs.dtype is torch.float32
    assert torch.equal(ours, theirs)


def test_autocast_is_in_the_way_only_where_it_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    casts = []
    monkeypatch.setattr("cuda_ops.autocast.cast", lambda *given: casts.append(given) or given[3:])
    x, y = torch.randn(2, 3), torch.randn(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cuda_ops.add(x, y), x + y) and not casts
        with pytest.raises(RuntimeError, match="cuda_ops::add"):
            cuda_ops.add(x, y.bfloat16())
    assert len(casts) == 1


def test_autocast_of_matmul_follows_torch() -> None:
    assert OPERATORS["matmul"].now.autocast == "lower_precision"
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = cuda_ops.matmul(a, b), torch.matmul(a, b)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs)
    for gradient in torch.autograd.grad(ours.sum(), [a, b]):
        assert gradient.dtype is torch.float32
