"""What a call would cost, and which of its tensors are ordinary ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

#: Arguments of more elements are run only where the fake refuses them, and outputs not at all.
_MOST_NUMEL = 1 << 20
#: Elements that no machine has memory for, so that allocating them fails at once.
_NO_MACHINE_HOLDS = 1 << 44


def is_plain(value: Any) -> bool:
    """Tells whether a value is an ordinary dense tensor on the CPU."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu":
        return False
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        return False
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(value) or torch._is_functional_tensor(value):
        return False
    if torch._is_zerotensor(value):
        return False
    if value._base is not None and value._base.is_nested:  # torch makes no fake of such a view
        return False
    return address(value) is not None


def address(value: Any) -> int | None:
    """Returns what tells the storage of a tensor from others; ``None`` if it has none."""
    try:
        return int(value.untyped_storage()._cdata)
    except Exception:
        return None


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Returns all memory of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors among values, in lists and dicts too."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def elements(values: Any) -> int:
    """Returns how many elements the tensors have, as far as they say."""
    count = 0
    for tensor in tensors_in(values):
        with contextlib.suppress(Exception):
            count += tensor.numel()
    return count


#: In what torch says of sizes or strides whose product it cannot hold, of no elements too.
OVERFLOWED = "calculation overflowed"


def is_large(values: Any) -> bool:
    """Tells whether a call could be too much work: its tensors have more elements than samples
    have, or a number might be a size.
    """
    numbers, most = [leaf for leaf in tree_leaves(values) if isinstance(leaf, int)], 0
    for tensor in tensors_in(values):
        with contextlib.suppress(Exception):  # a nested one has no sizes, or symbols
            # Also of one that is empty, and whose result is not.
            sizes: Sequence[Any] = tensor.shape
            known = [size for size in sizes if isinstance(size, int)]
            numbers += known
            most = max(most, math.prod(size for size in known if size))
    return (
        most > _MOST_NUMEL
        or elements(values) > _MOST_NUMEL
        or any(abs(number) > 4096 for number in numbers)
    )


def is_slow(values: Any) -> bool:
    """Tells whether a copy of the tensors would take seconds and fit into memory, perhaps."""
    return _MOST_NUMEL < elements(values) < _NO_MACHINE_HOLDS


def foretold(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> Literal["refused", "too large", "small"]:
    """Returns what the fake says of a call that could be too large."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    is_large = elements((args, kwargs)) > _MOST_NUMEL
    with FakeTensorMode() as mode:
        try:
            args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        except Exception:
            return "too large" if is_large else "small"
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if OVERFLOWED in str(error) and not is_large:
                return "small"  # it has no elements, and a kernel may take it
            return "refused"
    return "too large" if is_large or elements(result) > _MOST_NUMEL else "small"
