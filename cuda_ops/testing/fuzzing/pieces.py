"""What the text of a call may name beside torch: odd tensors, and things that are none."""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.values import CODES


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Overriding(torch.Tensor):
    """A subclass that raises where a function of torch sees it."""

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise ValueError(f"an override of {getattr(function, '__name__', function)}")


class Wrapper(torch.Tensor):
    """A tensor without memory around another one, as those of quantizing libraries."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, strides=held.stride()
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it otherwise
        cls, function: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda value: value.held, (args, kwargs or {}))
        return function(*args, **kwargs)


class Renamed:
    """Something that takes the place of a tensor without being one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class Number(float):
    """A float of another class."""


class Index:
    """Something that may be an int."""

    def __index__(self) -> int:
        return 1


class RaisingIndex:
    """Something that says it may be an int, and is not."""

    def __index__(self) -> int:
        raise ValueError("no index")


def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Makes the tensor that ``TensorArg`` describes with the same arguments, or one of zeros in a
    dtype that has no values to draw.
    """
    arg = TensorArg(*args, **kwargs)
    plain = arg.dtype.is_floating_point or arg.dtype.is_complex or arg.dtype in CODES
    if plain or arg.dtype in _INTEGERS:
        made: torch.Tensor = Sample((arg,)).make()[0]
        return made
    return torch.zeros(arg.shape, dtype=torch.uint8).to(arg.dtype)


_INTEGERS = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def freed(value: torch.Tensor) -> torch.Tensor:
    """Frees the tensor's memory and leaves its sizes."""
    value.untyped_storage().resize_(0)
    return value


def shrunk(value: torch.Tensor, left: int | None = None) -> torch.Tensor:
    """Shrinks the tensor's memory to half, or so many bytes, and leaves its sizes."""
    storage = value.untyped_storage()
    storage.resize_(storage.nbytes() // 2 if left is None else left)
    return value


def strided(value: torch.Tensor, stride: int) -> torch.Tensor:
    """Gives the first dim another stride, at most so that no element lies outside of the memory."""
    if not value.dim():
        return value
    strides, sizes = list(value.stride()), list(value.shape)
    strides[0] = stride
    if stride > 1:
        sizes[0] = min(sizes[0], 1)
    return value.as_strided(sizes, strides)


def escaped(value: torch.Tensor) -> torch.Tensor:
    """Returns what a batch of torch.vmap leaves behind."""
    kept: list[torch.Tensor] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one)
        return one.clone()

    torch.vmap(keep)(value)
    return kept[0]


def graded(value: torch.Tensor) -> torch.Tensor:
    """Returns what torch.func.grad leaves behind."""
    kept: list[torch.Tensor] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one)
        return one.sum()

    torch.func.grad(keep)(value)
    return kept[0]


def fake(value: torch.Tensor) -> torch.Tensor:
    """Returns a fake of a tensor, whose mode is off."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: torch.Tensor = FakeTensorMode().from_tensor(value)
    return made


def inferred(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that inference mode made."""
    with torch.inference_mode():
        return value.clone()


def dual(value: torch.Tensor) -> torch.Tensor:
    """Returns a dual number, whose level is over."""
    with torch.autograd.forward_ad.dual_level():
        made: torch.Tensor = torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))
        return made


def known() -> dict[str, Any]:
    """Returns what the text of a call may name beside operators."""
    numpy: dict[str, Any] = {}
    try:
        import numpy as np

        numpy = {"np": np}
    except ImportError:
        pass
    functions: tuple[Callable[..., Any], ...] = (
        tensor, freed, shrunk, strided, escaped, graded, fake, inferred, dual,
        Plain, Overriding, Wrapper, Renamed, Number, Index, RaisingIndex,
    )  # fmt: skip
    return {
        "torch": torch, "inf": math.inf, "nan": math.nan, "Decimal": decimal.Decimal,
        "Fraction": fractions.Fraction, **numpy,
        **{function.__name__: function for function in functions},
    }  # fmt: skip
