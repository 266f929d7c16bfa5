"""``torch.func.functionalize``, for which torch has a rule only for its own operators.

A kernel under the dispatcher's key for it would also take the operator out of torch.compile's own
functionalization. So the public functions, and what the dispatcher asks at the outermost transform,
ask here whether the innermost transform is this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

from cuda_ops.derive.arguments import split
from cuda_ops.derive.checks import refuse
from cuda_ops.spec import OpSpec


def is_innermost() -> bool:
    """Tells whether the innermost transform of torch.func is ``functionalize``."""
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()  # None without a transform
    return bool(interpreter is not None and interpreter.key() == TransformType.Functionalize)


def call(op: OpSpec, values: Sequence[Any]) -> Any:
    """Calls an operator below ``functionalize``. What it writes is written to copies, which take
    the place of the arguments.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    api = FunctorchFunctionalizeAPI(interpreter)
    plain: list[Any] = list(api.unwrap_tensors(tuple(values)))
    with api.redispatch_to_next():
        for i in op.written:
            copied, value = partial(_copy, op, op.argument_names[i]), plain[i]
            plain[i] = [*map(copied, value)] if _is_list(value) else copied(value)
        positional, keywords = split(op, plain)
        result = op.overload(*positional, **keywords)
    for i in op.written:
        pairs = zip(values[i], plain[i], strict=True) if _is_list(plain[i]) else [
            (values[i], plain[i])
        ]  # fmt: skip
        for wrapped, new in pairs:
            _replace(op, op.argument_names[i], wrapped, new)
    return None if result is None else api.wrap_tensors(result)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _copy(op: OpSpec, argument: str, value: Any) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):  # which the dispatcher has not seen yet
        refuse(op, argument, "a tensor", type(value).__name__)
    copied: torch.Tensor = value.clone()
    return copied


def _replace(op: OpSpec, argument: str, wrapped: Any, new: torch.Tensor | None) -> None:
    if wrapped is None or new is None:
        return
    if not torch._is_functional_tensor(wrapped):  # one from outside of the transform
        with torch.no_grad():
            wrapped.copy_(new)
        return
    torch._functionalize_replace(wrapped, new)
    torch._functionalize_commit_update(wrapped)
    torch._functionalize_sync(wrapped)
