"""What a graph depends on in a call of a function: its kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from cuda_ops.dispatch import compile_tag
from cuda_ops.runtime.graphs.places import Tensors

Key = tuple[Hashable, ...]

#: Types of arguments that hold no others. What else there is, torch's pytree looks into, which
#: takes the host longer than a launch.
_PLAIN = frozenset({
    torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, type(None), bool, int, float,
    complex, str, bytes,
})  # fmt: skip


class Call:
    """A call that can be made again with other tensors.

    Raises:
        TypeError: an argument that is no tensor has no hash.
    """

    __slots__ = ("_function", "_leaves", "_structure", "tensors")

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._function = function
        self._leaves: Sequence[Any] = (*args, *kwargs.values())
        #: How many arguments have no name, and the names of the others; or what torch says.
        self._structure: tuple[int, tuple[str, ...]] | TreeSpec = (len(args), tuple(kwargs))
        if not _PLAIN.issuperset(map(type, self._leaves)):
            self._leaves, self._structure = tree_flatten((args, kwargs))
            _check_hashes(self._leaves)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def __call__(self, tensors: Tensors, function: Callable[..., Any] | None = None) -> Any:
        """Returns what the function, or another one, returns with other tensors."""
        found = iter(tensors)
        leaves = [next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        if isinstance(self._structure, TreeSpec):
            args, kwargs = tree_unflatten(leaves, self._structure)
        else:
            count, names = self._structure
            args, kwargs = leaves[:count], dict(zip(names, leaves[count:], strict=True))
        return (function or self._function)(*args, **kwargs)

    def key(self) -> Key:
        """Returns what a graph depends on, beside a device and what a module says."""
        return (
            self._structure, *map(_described, self._leaves),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            compile_tag.current(), torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip


#: Any of these may change at any time, so all are asked at each call, by no loop of Python's.
_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")
_data_ptr = torch.Tensor.data_ptr


class Training:
    """What the parts and parameters of a module say of training, and where parameters are."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parts, self._parameters = [*module.modules()], [*module.parameters()]

    def key(self) -> Key:
        return (
            *map(_training, self._parts),
            *map(_requires_grad, self._parameters),
            *map(_data_ptr, self._parameters),
        )


def _described(leaf: Any) -> Hashable:
    if not isinstance(leaf, torch.Tensor):
        # 0.0 and -0.0 are equal, and NaN is not.
        return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf
    if leaf.layout == torch.strided:
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf.shape, leaf.layout, leaf.dtype, leaf.device


def _check_hashes(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                "graphed: an argument: expected tensors and values that have a hash, in dicts, "
                f"lists and tuples, got {type(leaf).__name__}"
            ) from None
