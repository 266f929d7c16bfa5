"""Every operator, through its public function, on the CPU and against what torch says.

There is no list of names here: an operator that is added is tested.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from shipped import (
    FORWARD,
    OPERATORS,
    TORCH,
    by_each_name,
    call_with,
    differentiable,
    differentiated,
    each,
    function_of,
    gradients,
)

import cuda_ops
from cuda_ops.registry import registry
from cuda_ops.testing import PROFILES, check_op
from cuda_ops.testing.case import Case
from cuda_ops.testing.samples import TensorArg
from cuda_ops.testing.subject import subject_of
from cuda_ops.testing.worker import Worker


def test_operators_were_found() -> None:
    assert FORWARD and set(TORCH) <= set(OPERATORS)


@each
@pytest.mark.quick("silu")
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@by_each_name
@pytest.mark.parametrize("name", [n for n, o in OPERATORS.items() if not o.spec.is_composite])
def test_a_sparse_or_nested_argument_is_refused_by_name(name: str, called: str) -> None:
    arguments = call_with(name)
    position = max(i for i, value in enumerate(arguments) if torch.is_tensor(value))
    shape, dtype = arguments[position].shape, arguments[position].dtype
    nothing = torch.zeros(len(shape), 0, dtype=torch.int64), torch.zeros(0, dtype=dtype)
    sparse = torch.sparse_coo_tensor(*nothing, shape, check_invariants=True)
    # This kind calls itself strided.
    nested = (
        [torch.nested.nested_tensor([torch.zeros(shape[1:])])] if dtype.is_floating_point else []
    )
    argument = OPERATORS[name].spec.argument_names[position]
    for arguments[position] in (sparse, *nested):
        with pytest.raises(RuntimeError, match=f"::{name}: argument '{argument}': expected a stri"):
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
        positions = differentiated(name, arguments)
        for actual, wanted in zip(
            *(gradients(f, arguments, positions) for f in (function, expected)), strict=True
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
@pytest.mark.slow
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
    monkeypatch.setattr(
        "cuda_ops.dispatch.autocast.cast", lambda *given: casts.append(given) or given[3:]
    )
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
