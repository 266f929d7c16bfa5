"""What torch.utils.flop_counter counts for operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ScratchOp, run_python
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import cuda_ops
from cuda_ops.dispatch import flops
from cuda_ops.errors import PluginError
from cuda_ops.registry import registry

A, B = torch.randn(5, 3, 8), torch.randn(8, 6)
X, WEIGHT, BIAS = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(6)
TOKENS, LOGITS = torch.randn(7, 8), torch.randn(7, 4)
GATE_UP, DOWN = torch.randn(4, 10, 8), torch.randn(4, 8, 5)


def counted(function: Callable[[], Any], *leaves: torch.Tensor) -> int:
    """Returns the FLOPs of a call, and of its gradients if there are leaves."""
    with FlopCounterMode(display=False) as counter:
        result = function()
        if leaves:
            torch.autograd.grad(result.sum(), leaves)
    return int(counter.get_total_flops())


def wanting(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def test_a_product_counts_as_torch_counts_it() -> None:
    assert counted(lambda: cuda_ops.matmul(A, B)) == counted(lambda: A @ B) == 2 * 5 * 3 * 8 * 6
    a, b = wanting(A, B)
    assert counted(lambda: cuda_ops.matmul(a, b), a, b) == counted(lambda: a @ b, a, b)
    mapped = torch.vmap(cuda_ops.matmul, in_dims=(0, None))
    assert counted(lambda: mapped(A, B)) == counted(lambda: A @ B)


def test_a_linear_layer_counts_as_torch_counts_it() -> None:
    def torchs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b))

    ours = cuda_ops.fused_linear_gelu
    assert counted(lambda: ours(X, WEIGHT, BIAS)) == counted(lambda: torchs(X, WEIGHT, BIAS))
    leaves = wanting(X, WEIGHT, BIAS)
    # The gradient computes the product again, in place of keeping it.
    again = counted(lambda: ours(X, WEIGHT, BIAS))
    expected = counted(lambda: torchs(*leaves), *leaves) + again
    assert counted(lambda: ours(*leaves), *leaves) == expected


@pytest.mark.parametrize("called", ["public", "operator"])
def test_a_mixture_counts_the_products_of_the_chosen_experts(called: str) -> None:
    moe = cuda_ops.moe if called == "public" else torch.ops.cuda_ops.moe
    one = 2 * 7 * 2 * 8 * 5  # tokens, choices, H, I
    assert counted(lambda: moe(TOKENS, LOGITS, GATE_UP, DOWN, 2)) == 3 * one
    x, gate_up, down = wanting(TOKENS, GATE_UP, DOWN)
    assert counted(lambda: moe(x, LOGITS, gate_up, down, 2), x, gate_up, down) == 9 * one
    (x,) = wanting(TOKENS)  # the gradients of the matrices are not computed
    assert counted(lambda: moe(x, LOGITS, GATE_UP, DOWN, 2), x) == 6 * one


@pytest.mark.parametrize("name", ["matmul", "matmul_backward", "fused_linear_gelu"])
def test_the_benchmarks_count_the_same(name: str) -> None:
    operator = registry().operators(name.removesuffix("_backward"))[name]
    cases = registry().plugins.ask("cuda_ops_benchmarks", operator.spec)
    calls = [case for case in cases if not case.function and not case.backward]
    assert calls
    for case in calls:
        args = case.make_inputs(torch.device("meta"))
        call = functools.partial(operator.spec.overload, *args)
        assert counted(call) == case.flops, case.label


PLUGIN = """
from cuda_ops.hookspecs import hookimpl
@hookimpl
def cuda_ops_flops(op):
    return lambda x, *scalars: {} * x[0]
"""


def test_an_operator_of_others_is_counted_from_its_first_use_on(scratch_op: ScratchOp) -> None:
    plugin = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    plugin.write_text(PLUGIN.format(3))
    scratch_op.write("v * 2", "g * 2")
    scratch_op.build()
    registry().rescan()
    x = torch.randn(4, 2)
    assert counted(lambda: scratch_op.function(x)) == 12  # loaded within the counter's block
    plugin.write_text(PLUGIN.format(5))
    scratch_op.reload()
    assert counted(lambda: scratch_op.function(x)) == 20
    plugin.unlink()
    scratch_op.reload()
    assert counted(lambda: scratch_op.function(x)) == 0


def test_the_counter_is_not_imported_for_its_sake() -> None:
    code = """
import sys, torch, cuda_ops
a, b = torch.randn(3, 4), torch.randn(4, 5)
cuda_ops.matmul(a, b)
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    cuda_ops.matmul(a, b)
assert counter.get_total_flops() == 120, counter.get_flop_counts()
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_look_for_the_module_does_not_count_as_its_import() -> None:
    code = """
import importlib.util, torch, cuda_ops
x = torch.ones(2, 3)
cuda_ops.matmul(x, x.T)
for module in ("torch.utils.flop_counter", "torch.distributed.tensor"):
    importlib.util.find_spec(module)
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as mode:
    cuda_ops.matmul(x, x.T)
assert mode.get_total_flops() == 2 * 2 * 3 * 2, mode.get_total_flops()
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_formula_that_raises_is_named() -> None:
    flops.register(cuda_ops.registry.registry().operators("silu")["silu"].spec, lambda x: x.missing)
    try:
        named = pytest.raises(PluginError, match="cuda_ops::silu: the formula of cuda_ops_flops")
        with named, FlopCounterMode(display=False):
            cuda_ops.silu(torch.ones(2))
    finally:
        flop_counter.flop_registry.pop(torch.ops.cuda_ops.silu)
