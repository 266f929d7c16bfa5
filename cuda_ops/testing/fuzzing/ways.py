"""Ways to call an operator: modes, transforms, tracers, as text with ``{}`` for the function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from cuda_ops.testing.backward import checkpointed as recomputed

Function = Callable[..., Any]

#: The plain call is by far the one that users write, and each byte may choose it.
WAYS = (
    *["{}"] * 12,
    "torch.no_grad()({})",
    "torch.inference_mode()({})",
    "torch.autocast('cpu', torch.bfloat16)({})",
    "torch.autocast('cpu', torch.float16)({})",
    "torch.vmap({})",
    "torch.vmap({}, in_dims=-1)",
    "torch.vmap({}, in_dims=1, out_dims=-1)",
    "torch.vmap({}, randomness='different')",
    "torch.vmap(torch.vmap({}))",
    "torch.func.functionalize({})",
    "torch.func.grad(summed({}))",
    "torch.func.grad(summed({}), argnums=1)",
    "torch.vmap(torch.func.grad(summed({})))",
    "backward({})",
    "jvp({})",
    "faked({})",
    "on_meta({})",
    "deterministic({})",
    "profiled({})",
    "traced({})",
    "checkpointed({})",
    "under_mode({})",
    "distributed({}, 'shard')",
    "distributed({}, 'replicate')",
)


def _tensors(function: Callable[[torch.Tensor], Any], *values: Any) -> Any:
    return tree_map_only(torch.Tensor, function, values)


def summed(function: Function) -> Function:
    """Returns the function with its floating results added up."""

    def called(*args: Any, **kwargs: Any) -> Any:
        found = torch.utils._pytree.tree_leaves(function(*args, **kwargs))
        return sum(one.sum() for one in found if _is_floating(one))

    return called


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def backward(function: Function) -> Function:
    """Returns the function, its floating arguments asking for a gradient, which is computed."""

    def leaf(value: torch.Tensor) -> torch.Tensor:
        plain = _is_floating(value) and value.is_leaf
        return value.detach().requires_grad_() if plain else value

    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _tensors(leaf, args, kwargs)
        total = summed(function)(*args, **kwargs)
        if isinstance(total, torch.Tensor) and total.requires_grad:
            torch.autograd.backward(total)
        return total

    return called


def jvp(function: Function) -> Function:
    """Returns the function in forward mode, its floating arguments with tangents."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            args, kwargs = _tensors(_dual, args, kwargs)
            return function(*args, **kwargs)

    return called


def _dual(value: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    # torch's own assertions fail for a dual number of a fake whose mode is off.
    if not _is_floating(value) or isinstance(value, FakeTensor):
        return value
    made: torch.Tensor = torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))
    return made


def faked(function: Function) -> Function:
    """Returns the function under a fake mode, its tensors made fakes."""

    def called(*args: Any, **kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            args, kwargs = _tensors(mode.from_tensor, args, kwargs)
            return function(*args, **kwargs)

    return called


def on_meta(function: Function) -> Function:
    """Returns the function of tensors without data."""

    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _tensors(lambda value: value.to("meta"), args, kwargs)
        return function(*args, **kwargs)

    return called


def deterministic(function: Function) -> Function:
    """Returns the function where only deterministic operators may run."""

    def called(*args: Any, **kwargs: Any) -> Any:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return function(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(before)

    return called


def profiled(function: Function) -> Function:
    """Returns the function under torch's profiler."""

    def called(*args: Any, **kwargs: Any) -> Any:
        profiler: Any = torch.autograd.profiler.profile
        with profiler(use_kineto=False):
            return function(*args, **kwargs)

    return called


def traced(function: Function) -> Function:
    """Returns the function as make_fx traces it, with symbolic sizes."""

    def called(*args: Any, **kwargs: Any) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        made = make_fx(functools.partial(function, **kwargs), tracing_mode="symbolic")
        return made(*args)

    return called


def checkpointed(function: Function) -> Function:
    """Returns the function under torch.utils.checkpoint, its gradient computed."""
    return backward(recomputed(function))


def under_mode(function: Function) -> Function:
    """Returns the function under a mode of torch's functions that changes nothing."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.overrides.BaseTorchFunctionMode():
            return function(*args, **kwargs)

    return called


def distributed(function: Function, placement: str) -> Function:
    """Returns the function of DTensors: each tensor is the part of one of two processes, of which
    the other is made up.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.utils._dtype_abbrs import dtype_abbrs

        def placed(value: torch.Tensor) -> Any:
            if value.is_quantized or value.is_nested or value.dtype not in dtype_abbrs:
                raise ValueError("DTensor takes it, and can neither propagate nor print it")
            if torch._is_functional_tensor(value):
                raise ValueError("torch crashes as it gathers the parts of such a DTensor")
            return DTensor.from_local(value, mesh, placements)

        mesh = _mesh()
        placements = [Shard(0) if placement == "shard" else Replicate()]
        args, kwargs = _tensors(placed, args, kwargs)
        return function(*args, **kwargs)

    return called


def _mesh() -> Any:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return dist.device_mesh.init_device_mesh("cpu", (2,))


KNOWN = {
    function.__name__: function
    for function in (
        summed, backward, jvp, faked, on_meta, deterministic, profiled, traced, checkpointed,
        under_mode, distributed,
    )
}  # fmt: skip
