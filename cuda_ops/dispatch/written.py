"""What torch needs to know of an operator that writes its arguments, ``Tensor(a!) x``.

:func:`torch.library.register_autograd` and ``register_vmap`` are for operators that write nothing,
so the kernels of these keys are registered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from cuda_ops.derive.arguments import bind, split
from cuda_ops.derive.checks import refuse
from cuda_ops.derive.forward_mode import refuse_tangent
from cuda_ops.dispatch.generation import Served
from cuda_ops.dispatch.naming import named
from cuda_ops.dispatch.public import tangents_of
from cuda_ops.spec import OpSpec

_LAZY = torch._C.DispatchKeySet(torch._C.DispatchKey.Negative) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.Conjugate
)


def register(library: torch.library.Library, operator: Served) -> None:
    """Registers autograd, which refuses a gradient; the counter of versions; vmap; and what is
    lazily negated or conjugated, for which torch's own kernel expects an operator to return what
    it writes.
    """
    name = operator.spec.name

    def autograd(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        op = operator.spec
        if torch.is_grad_enabled():
            refuse_gradients(op, bind(op, args, kwargs))
        # Under torch.func.jvp; elsewhere dual numbers were refused before.
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
            for position, tangent in enumerate(tangents_of(bind(op, args, kwargs))):
                if tangent is not None:
                    refuse_tangent(op, position)
        below = keyset & torch._C._after_autograd_keyset
        return op.overload.redispatch(below, *args, **kwargs)

    def counted(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        op = operator.spec
        # So that a gradient which needs the values from before raises.
        torch.autograd.graph.increment_version(tensors_written(op, bind(op, args, kwargs)))
        below = keyset & torch._C._after_ADInplaceOrView_keyset
        return op.overload.redispatch(below, *args, **kwargs)

    def resolved(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        op = operator.spec
        given = bind(op, args, kwargs)
        with named(op):
            plain = tree_map_only(torch.Tensor, lambda x: x.resolve_neg().resolve_conj(), given)
            positional, keywords = split(op, plain)
            result = op.overload.redispatch(keyset - _LAZY, *positional, **keywords)
            written = (tensors_written(op, values) for values in (given, plain))
            for old, new in zip(*written, strict=True):
                if old is not new:
                    old.copy_(new)
        return result

    def batched(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _batched(operator, bind(operator.spec, args, kwargs))

    for key, kernel in (
        ("Autograd", autograd), ("ADInplaceOrView", counted), ("FuncTorchBatched", batched),
        ("Negative", resolved), ("Conjugate", resolved),
    ):  # fmt: skip
        library.impl(name, kernel, key, with_keyset=True)


def tensors_written(op: OpSpec, values: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments that the operator writes."""
    given = [values[i] for i in op.written]
    listed = [value if isinstance(value, (list, tuple)) else [value] for value in given]
    return [tensor for tensors in listed for tensor in tensors if tensor is not None]


def refuse_gradients(op: OpSpec, values: Sequence[Any]) -> None:
    """Refuses a tensor that requires a gradient, which would be lost in what is written."""
    for name, value in zip(op.argument_names, values, strict=True):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                refuse(
                    op, name,
                    f"a tensor that requires no gradient, as the operator writes "
                    f"{op.written_text}; call "
                    "it under torch.no_grad()", "one that requires a gradient",
                )  # fmt: skip


def _is_mapped(dim: Any) -> bool:
    return any(map(_is_mapped, dim)) if isinstance(dim, list) else dim is not None


def _batched(operator: Served, values: list[Any]) -> Any:
    """Calls the batching rule with the tensors and mapped dims of the innermost vmap."""
    functorch = torch._C._functorch
    interpreter: Any = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    dims: list[Any] = []

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            parts = [
                functorch._unwrap_batched(one, level) if isinstance(one, torch.Tensor)
                else (one, None)
                for one in value
            ]  # fmt: skip
            dims.append([dim for _, dim in parts])
            return [one for one, _ in parts]
        if not isinstance(value, torch.Tensor):
            dims.append(None)
            return value
        tensor, dim = functorch._unwrap_batched(value, level)
        dims.append(dim)
        return tensor

    bare = [plain(value) for value in values]
    info = VmapInfo(interpreter.batch_size(), interpreter.randomness())
    positional, keywords = split(operator.spec, bare)
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
    ):
        if not any(map(_is_mapped, dims)):  # but by a vmap further out
            return operator.spec.overload(*positional, **keywords)
        result, out_dims = operator._vmap(info, tuple(dims), *positional, **keywords)

    def wrapped(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        return tensor if dim is None else functorch._add_batch_dim(tensor, dim, level)

    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        return wrapped(result, out_dims)
    return tuple(map(wrapped, result, out_dims))
