"""``torch.compile`` without graph breaks, gradient included, for one size and for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check, sums, wanting
from cuda_ops.testing.draw import Draw, follows_line
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped


@check("compile_static", None, "wrong under torch.compile", Draw(2, range(2, 513)), quick=True)
def compile_static(case: Case) -> None:
    """Compares one graph for these sizes with eager."""
    _agrees(case)


def _small(op: OpSpec) -> list[Sample]:
    return [shaped(op, (11, 13), core=5)]


@check("compile_dynamic", None, "wrong under torch.compile with dynamic shapes",
       Draw(1, range(2, 513), listed=_small), quick=True)  # fmt: skip
def compile_dynamic(case: Case) -> None:
    """Compares one graph for these sizes and, without tracing again, for others."""
    op = case.subject.op
    # A size that is an int, not a SymInt, is a constant of the graph.
    dims = [] if op.tensor_positions else op.drawn_dims
    may_change = follows_line(case.subject) and all(f"SymInt {dim}" in op.schema for dim in dims)
    others = [shaped(op, (7, 2), core=8)] if may_change else []
    _agrees(case, *(replace(case, sample=other) for other in others), dynamic=True)


def _agrees(*cases: Case, dynamic: bool = False) -> None:
    op = cases[0].operator

    def called(*args: Any) -> Any:
        return op(*args)

    torch._dynamo.reset()
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for i, case in enumerate(cases):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            actual = _results(compiled, case)
        what = f"compiled for {cases[0].sample}, called with {case.sample}"
        case.same(actual, _results(op, case), what)


def _results(function: Callable[..., Any], case: Case) -> list[torch.Tensor]:
    """Returns outputs and gradients."""
    declared = case.subject.gradient == "declared"
    args = case.leaves() if declared else case.arguments()
    values = list(case.results(function, args))
    if declared and (ends := sums(values)):
        found = torch.autograd.grad(ends, wanting(args), allow_unused=True)
        # allow_unused gives None, which torch's type hints leave out.
        values += filter(torch.is_tensor, found)
    return values
