"""How often torch.compile compiles a call whose numbers change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ScratchOp
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend

import cuda_ops

X = torch.randn(4, 32)
INTS, FLOATS = range(2, 14), [0.125 * i for i in range(2, 14)]
EXPERTS = torch.randn(4, 8), torch.randn(32, 6, 8), torch.randn(32, 8, 3)


def compilations(function: Callable[[Any], Any], values: Iterable[Any]) -> int:
    """Returns how often the function is compiled for these values, each compared with eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for value in values:
        torch.testing.assert_close(compiled(value), function(value))
    return counter.frame_count


CHANGING: dict[str, Callable[[int], Any]] = {
    "torch.topk": lambda k: tuple(torch.topk(X, k)),
    "bitonic_topk": lambda k: cuda_ops.bitonic_topk(X, k),
    "bitonic_topk in torch.ops": lambda k: torch.ops.cuda_ops.bitonic_topk(X, k),
    "moe_route": lambda k: cuda_ops.moe_route(X, k),
    "moe_route_map": lambda n: torch.ops.cuda_ops.moe_route_map(torch.tensor([[0, 1]]), n),
    "moe": lambda k: cuda_ops.moe(EXPERTS[0], X, *EXPERTS[1:], k),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_number_that_changes_is_compiled_twice(name: str) -> None:
    """Once for the first value, and once for all others: as with torch.topk."""
    assert compilations(CHANGING[name], INTS) == 2


KEPT = """
#include "binding.h"
using namespace cuda_ops;
namespace {{
using Ints = std::vector<int64_t>;
Tensor first(const Tensor& x, int64_t k, std::optional<int64_t> n, const Ints& more) {{
  if (k + n.value_or(0) + more.at(0) > 9) refuse("k", "less", "more");
  Tensor out = empty({{x.size(0), k}}, x);
  for (int64_t i = 0; i < x.size(0); ++i) {{
    for (int64_t j = 0; j < k; ++j) {{
      static_cast<float*>(out.mutable_data_ptr())[i * k + j] =
          static_cast<const float*>(x.const_data_ptr())[i * x.size(1) + j];
    }}
  }}
  return out;
}}
}}  // namespace
CUDA_OPS(library) {{
  library.op("{op}(Tensor x, {int} k, {int}? n=None, {int}[] more=[0]) -> Tensor", "(m)->(k)")
      .dtypes({{DType::kFloat32}})
      .range("k", 1, 9)
      .at_most("k", "m")
      .cpu<first>();
}}
"""


@pytest.mark.parametrize("spelling", ["SymInt", "int"])
def test_the_schema_says_which_ints_may_change(scratch_op: ScratchOp, spelling: str) -> None:
    scratch_op.binding.write_text(KEPT.format(op=scratch_op.name, int=spelling))
    scratch_op.reload()
    kept = scratch_op.function

    def called(k: int) -> Any:
        return kept(X, k, n=k - k, more=[k - k])

    with pytest.raises(RuntimeError, match="argument 'k': expected from 1 to 9, got 10"):
        kept(X, 10)
    if spelling == "SymInt":
        assert compilations(called, range(1, 10)) == 2
    else:
        with pytest.raises(FailOnRecompileLimitHit):
            compilations(called, range(1, 10))


def test_a_float_is_compiled_for_each_value_as_in_torch(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * by", "g * by", parameter=", double by", schema=", float by")
    scratch_op.reload()
    scaled = scratch_op.function
    for function in (lambda by: F.elu(X, by), lambda by: scaled(X, by)):
        with pytest.raises(FailOnRecompileLimitHit):
            compilations(function, FLOATS)
    # Arithmetic in Python is what torch keeps open.
    assert compilations(lambda by: scaled(X, 2.0) * by, FLOATS) == 2
