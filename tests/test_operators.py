"""Every operator there is, through its public function, on the CPU and against what torch says.

There is no list of names here: an operator that is added is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cuda_ops
from cuda_ops.check import check_op
from cuda_ops.derive import NoGradient
from cuda_ops.dev import compile_ops
from cuda_ops.discovery import BUILTIN_ROOT, Kind
from cuda_ops.operator import Operator
from cuda_ops.registry import all_operators, registry
from cuda_ops.samples import LAYOUTS, Sample, TensorArg, example_scalar


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
each_forward = pytest.mark.parametrize("name", FORWARD)

#: What torch itself computes, for operators that have a counterpart there.
TORCH: dict[str, Callable[..., Any]] = {
    "silu": F.silu,
    "silu_backward": torch.ops.aten.silu_backward,
    "matmul": torch.matmul,
    "fused_relu_scale": lambda x, alpha: F.relu(x) * alpha,
    "scale_relu": lambda x, scale: F.relu(x * scale + 1),
    "sum_rows": lambda x: x.sum(-1),
    "reduce_sum": torch.sum,
}


def call_with(
    name: str,
    *,
    loop: tuple[int, ...] = (3, 4),
    dtype: torch.dtype | None = None,
    layout: Any = "contiguous",
    core: int = 5,
    seed: int = 0,
) -> list[Any]:
    """Arguments that fit the signature line: loop dims as given, core dims of different sizes."""
    op = OPERATORS[name].spec
    # Without a signature line there are no core dims.
    inputs = op.signature.inputs if op.signature else ((),) * len(op.tensor_positions)
    preferred = (torch.float32, *op.dtypes)
    if dtype is None or dtype not in (op.dtypes or (dtype,)):
        dtype = next(d for d in preferred if d in op.dtypes or not op.dtypes)
    dims = sorted({dim for group in inputs for dim in group if not dim.isdigit()})
    sizes = {dim: core and core + i for i, dim in enumerate(dims)}
    groups = iter(inputs)

    def shape(group: tuple[str, ...]) -> tuple[int, ...]:
        return (*loop, *(int(dim) if dim.isdigit() else sizes[dim] for dim in group))

    arguments = tuple(
        TensorArg(shape(next(groups)), dtype, layout)
        if i in op.tensor_positions
        else example_scalar(argument)
        for i, argument in enumerate(op.parsed.arguments)
        if not argument.kwarg_only
    )  # fmt: skip
    return list(Sample(arguments, seed=seed).make())


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
    leaves = [a.detach().clone().requires_grad_() if torch.is_tensor(a) else a for a in arguments]
    return list(torch.autograd.grad(total(function(*leaves)), tensors(leaves)))


def test_operators_were_found() -> None:
    assert FORWARD and set(TORCH) <= set(OPERATORS)


@each
def test_every_check_passes(name: str) -> None:
    report = check_op(OPERATORS[name].spec, registry().plugins)
    assert report.passed, str(report)


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


# --- layouts and sizes -------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@each
def test_the_layout_changes_nothing_but_the_layout(name: str, layout: str) -> None:
    function = getattr(cuda_ops, name)
    signature = OPERATORS[name].spec.signature
    dims = 4 - max(map(len, signature.inputs), default=0) if signature else 4  # for channels_last
    arguments = call_with(name, loop=(2, 3, 4, 5)[:dims], layout=layout)
    plain = [a.contiguous().clone() if torch.is_tensor(a) else a for a in arguments]
    kept = [a.clone() if torch.is_tensor(a) else a for a in arguments]
    result = tensors(function(*arguments))
    for actual, expected in zip(result, tensors(function(*plain)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for before, after in zip(tensors(kept), tensors(arguments), strict=True):
        assert torch.equal(before, after)  # inputs are left alone
    if differentiable(name):
        for actual, expected in zip(
            gradients(function, arguments), gradients(function, plain), strict=True
        ):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("loop", "core"), [((0,), 5), ((3, 0, 2), 5), ((2,), 0), ((), 5), ((1,), 1)]
)
@each
def test_empty_and_single_sizes(name: str, loop: tuple[int, ...], core: int) -> None:
    function, arguments = getattr(cuda_ops, name), call_with(name, loop=loop, core=core)
    fakes = [a.to("meta") if torch.is_tensor(a) else a for a in arguments]
    result = tensors(function(*arguments))
    for actual, expected in zip(result, tensors(function(*fakes)), strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert actual.numel() == 0 or 0 not in loop or OPERATORS[name].spec.signature is None
    if name in TORCH:
        torch.testing.assert_close(result, tensors(TORCH[name](*arguments)))
    if differentiable(name):
        for gradient, argument in zip(
            gradients(function, arguments), tensors(arguments), strict=True
        ):
            assert gradient.shape == argument.shape


# --- transforms ----------------------------------------------------------------------------


@each_differentiable
def test_func_grad_agrees_with_autograd(name: str) -> None:
    function, arguments = getattr(cuda_ops, name), call_with(name)
    positions = OPERATORS[name].spec.tensor_positions

    def loss(*values: Any) -> torch.Tensor:
        return total(function(*values))

    actual = torch.func.grad(loss, argnums=positions)(*arguments)
    for one, expected in zip(actual, gradients(function, arguments), strict=True):
        torch.testing.assert_close(one, expected)


@each
def test_vmap_agrees_with_a_loop(name: str) -> None:
    function = getattr(cuda_ops, name)
    positions = OPERATORS[name].spec.tensor_positions
    calls = [call_with(name, seed=seed) for seed in range(3)]
    for mapped in [positions, *((position,) for position in positions)]:
        in_dims = tuple(0 if i in mapped else None for i in range(len(calls[0])))
        stacked = [
            torch.stack([c[i] for c in calls]) if i in mapped else value
            for i, value in enumerate(calls[0])
        ]
        looped = [
            tensors(function(*((c if i in mapped else calls[0])[i] for i in range(len(c)))))
            for c in calls
        ]
        batched = tensors(torch.vmap(function, in_dims=in_dims)(*stacked))
        for actual, parts in zip(batched, zip(*looped, strict=True), strict=True):
            torch.testing.assert_close(actual, torch.stack(parts))


@each_differentiable
def test_gradients_per_sample(name: str) -> None:
    function = getattr(cuda_ops, name)
    positions = OPERATORS[name].spec.tensor_positions
    calls = [call_with(name, seed=seed) for seed in range(3)]

    def loss(*values: Any) -> torch.Tensor:
        return total(function(*values))

    in_dims = tuple(0 if i in positions else None for i in range(len(calls[0])))
    stacked = [
        torch.stack([c[i] for c in calls]) if i in positions else value
        for i, value in enumerate(calls[0])
    ]
    per_sample = torch.vmap(torch.func.grad(loss, argnums=positions), in_dims=in_dims)(*stacked)
    for k, actual in enumerate(per_sample):
        expected = torch.stack([gradients(function, c)[k] for c in calls])
        torch.testing.assert_close(actual, expected)


@each
def test_compiled_code_is_one_graph_that_serves_every_size(name: str) -> None:
    function = getattr(cuda_ops, name)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: function(*a), fullgraph=True, dynamic=True, backend=backend)
    # No size that is a number of a signature line: equal sizes are taken for the same one.
    for loop, core in (((5, 4), 6), ((7, 2), 8), ((2, 9), 10)):
        arguments = call_with(name, loop=loop, core=core)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert graphs == 1


@each_forward
def test_compiled_code_has_the_gradient(name: str) -> None:
    if not differentiable(name):
        assert f"{name}_backward" not in OPERATORS
        return
    function = getattr(cuda_ops, name)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a: function(*a), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for loop, core in (((3, 4), 5), ((7, 2), 6)):
        arguments = call_with(name, loop=loop, core=core)
        for actual, expected in zip(
            gradients(compiled, arguments), gradients(function, arguments), strict=True
        ):
            torch.testing.assert_close(actual, expected)


# --- autocast ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n, o in OPERATORS.items() if any(d.is_floating_point for d in o.spec.dtypes)]
)
def test_autocast_does_what_the_operator_declares(name: str) -> None:
    function, policy = getattr(cuda_ops, name), OPERATORS[name].now.autocast
    for dtype in (torch.float32, torch.float16, torch.float64):
        arguments = call_with(name, dtype=dtype)
        wide = dtype is torch.float64
        target = {"lower_precision": torch.bfloat16, "float32": torch.float32}.get(
            policy or "", dtype
        )
        target = dtype if wide else target
        expected = function(*(a.to(target) if torch.is_tensor(a) else a for a in arguments))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = function(*arguments)
            assert [t.dtype for t in tensors(actual)] == [target] * len(tensors(actual))
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert tensors(function(*arguments))[0].dtype is dtype


def test_autocast_of_matmul_follows_torch() -> None:
    assert OPERATORS["matmul"].now.autocast == "lower_precision"
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = cuda_ops.matmul(a, b), torch.matmul(a, b)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs)
    for gradient in torch.autograd.grad(ours.sum(), [a, b]):
        assert gradient.dtype is torch.float32


# --- DTensor -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", [n for n, o in OPERATORS.items() if o.spec.signature])
def test_loop_dims_stay_sharded_and_are_not_communicated(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    function = getattr(cuda_ops, name)
    arguments = call_with(name, loop=(4, 6))
    local = [a[:2].clone() if torch.is_tensor(a) else a for a in arguments]
    sharded = [
        DTensor.from_local(a, mesh, [Shard(0)], run_check=False) if torch.is_tensor(a) else a
        for a in local
    ]
    with CommDebugMode() as communication:
        results = tensors(function(*sharded))
    assert communication.get_total_counts() == 0
    for result, expected in zip(results, tensors(function(*local)), strict=True):
        assert isinstance(result, DTensor) and result.placements == (Shard(0),)
        assert result.shape[0] == 4 and math.prod(result.to_local().shape) == expected.numel()
        torch.testing.assert_close(result.to_local(), expected)
