"""``torch.func.functionalize``: operators that write their arguments, and those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from torch.fx.experimental.proxy_tensor import make_fx

import cuda_ops
from cuda_ops.registry import registry

SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
void add_(const Tensor& x, const Tensor& y) {
  write_elementwise_cpu(x, [](double a, double b) { return a + b; }, x, y);
}
Tensor counted(const Tensor& x, const std::optional<Tensor>& sum) {
  if (sum) write_elementwise_cpu(*sum, [](double a, double b) { return a + b; }, *sum, x);
  return elementwise_cpu([](double v) { return 2 * v; }, x);
}
void add_each(const std::vector<Tensor>& xs, const Tensor& y) {
  for (const Tensor& x : xs) add_(x, y);
}
}
CUDA_OPS(library) {
  library.op("OP(Tensor(a!) x, Tensor y) -> ()", "(n),(n)->").dtypes(kFloating).cpu<add_>();
  library.op("OP_counted(Tensor x, Tensor(a!)? sum=None) -> Tensor", "(),()->()")
      .dtypes(kFloating).cpu<counted>();
  library.op("OP_each(Tensor(a!)[] xs, Tensor y) -> ()", "").cpu<add_each>();
}
"""


@pytest.fixture(scope="module")
def name(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_functional", scratch_root)
    with scratch.built(SOURCE.replace('"OP', f'"{scratch.name}')):
        yield scratch.name


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_what_is_written_is_seen(name: str, remove: str) -> None:
    add_, counted = registry().public(name), registry().public(f"{name}_counted")
    each = registry().public(f"{name}_each")

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = x.view(2, 6)
        add_(x, y)  # which the view must show too
        total, unused = torch.zeros_like(y), counted(y)
        doubled = counted(y, total)
        each([rows[0], rows[1]], total.repeat(2))
        return rows.clone(), doubled, total, unused

    x, y = torch.randn(4, 3), torch.randn(3)
    other = x.clone()
    expected = function(x, y)
    found = torch.func.functionalize(function, remove=remove)(other, y)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(other, x)


def test_a_trace_of_it_writes_no_argument(name: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        registry().public(name)(total, y)
        return total

    x, y = torch.randn(4, 3), torch.randn(3)
    traced = make_fx(torch.func.functionalize(function))(x, y)
    torch.testing.assert_close(traced(x, y), x + y)


def test_inside_of_other_transforms(name: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        registry().public(name)(total, y)
        return cuda_ops.silu(total)

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    expected = torch.nn.functional.silu(x + y)
    mapped = torch.vmap(torch.func.functionalize(function))
    torch.testing.assert_close(mapped(x, y), expected)


@pytest.mark.parametrize("called", [cuda_ops, torch.ops.cuda_ops])
def test_what_writes_nothing(called: Any) -> None:
    x = torch.randn(4, 3)
    functional = torch.func.functionalize(lambda v: called.silu(v * 2).sum())
    expected = torch.func.grad(lambda v: torch.nn.functional.silu(v * 2).sum())(x)
    torch.testing.assert_close(functional(x), torch.nn.functional.silu(x * 2).sum())
    torch.testing.assert_close(torch.func.grad(functional)(x), expected)
    batched = torch.vmap(torch.func.functionalize(called.silu))
    torch.testing.assert_close(batched(x), torch.nn.functional.silu(x))
    outside = torch.func.functionalize(torch.vmap(called.silu))
    torch.testing.assert_close(outside(x), torch.nn.functional.silu(x))
    around = torch.func.functionalize(torch.func.grad(lambda v: called.silu(v).sum()))
    with pytest.raises(RuntimeError, match="Functionalize rule"):  # which torch does not have
        around(x)
