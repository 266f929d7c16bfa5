"""What an operator writes, in a graph in which Inductor takes copies away and brings them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.testing.arguments import each
from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.tolerance import tensors


def _writes_nothing(subject: Subject, device: str) -> str:
    if not subject.op.written:
        return "it writes no argument"
    return "" if subject.op.tensor_positions else "no argument is a tensor"


@check("reinplaced", None, "wrong where Inductor removes or adds copies of what is written",
       Draw(1, range(2, 513)), excuse=_writes_nothing)  # fmt: skip
def reinplaced(case: Case) -> None:
    """Compares a graph that writes to copies, for which Inductor may use the memory of what they
    are copies of, with eager: where that is used afterwards, where it is not, and where it is
    another argument of the same call, as in ``y = x.clone(); op(y, x)``.
    """
    from torch._inductor import config

    program = _program(case)
    args = case.arguments()
    before = [each(_copy, value) for value in args]
    expected = program(*args)
    torch._dynamo.reset()
    # Copies are what counts, and C++ or Triton around them would take most of the time.
    options: dict[str, Any] = {}
    if hasattr(config, "fallback_by_default"):
        options["fallback_by_default"] = True
    try:
        compiled = torch.compile(program, fullgraph=True, dynamic=False, options=options)
        actual = compiled(*args)
    except torch._inductor.exc.InductorError as error:
        if "compiler" not in str(error).lower():
            raise
        raise NotRunError(f"Inductor finds no compiler: {error}") from error
    case.same(actual, expected, "compiled by Inductor")
    case.same(tensors(args), tensors(before), "arguments after calls that write to copies of them")


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _program(case: Case) -> Callable[..., list[torch.Tensor]]:
    op, written = case.operator, case.subject.op.written

    def once(args: list[Any]) -> list[torch.Tensor]:
        """Writes to copies; returns these and the results."""
        given = [each(_copy, v) if i in written else v for i, v in enumerate(args)]
        found = op(*given)
        return [*tensors([found]), *tensors([given[i] for i in written if i < len(given)])]

    def program(*args: Any) -> list[torch.Tensor]:
        used_later = once(list(args))
        unused = once([each(_computed, v) if i in written else v for i, v in enumerate(args)])
        own = [each(_computed, v) for v in args]
        for i in written:
            for k, other in enumerate(own):
                if i < len(own) and k not in written and _are_alike(own[i], other):
                    own[k] = own[i]
        return [*used_later, *unused, *once(own), *(v + 0 for v in tensors(args) if _adds(v))]

    return program


def _computed(value: Any) -> Any:
    """Returns the same numbers in memory of the graph's own, which nothing else needs."""
    if not isinstance(value, torch.Tensor):
        return value
    return value + 0 if _adds(value) else value.clone()


def _adds(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.itemsize > 1


def _are_alike(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and (a.shape, a.dtype) == (b.shape, b.dtype)
