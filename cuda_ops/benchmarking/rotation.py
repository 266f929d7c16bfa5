"""The arguments of a train: copies that hold other values in every train, and that share nothing
but what the case makes once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import BenchmarkCase
from cuda_ops.testing.samples import DeviceArg
from cuda_ops.testing.values import CODES

# A seed that no set of arguments has: its numbers would repeat those that all have in common.
_SHARED_SEED = 2**31


@dataclass
class Shared:
    """What all copies of a case have in common, by position, and the values it must keep."""

    arguments: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]


class Rotation:
    """``copies`` sets of arguments, and as many sets of values that move round among them.

    In train ``t`` copy ``i`` holds the values ``(i + t) % copies``. So a result that was kept from
    an earlier call is wrong, and an argument that was written over is restored. All copies and sets
    have in common what the case shares.
    """

    def __init__(
        self,
        case: BenchmarkCase,
        device: torch.device,
        copies: int,
        shared: Shared | None = None,
    ) -> None:
        """Makes all sets; ``shared`` is that of another rotation of the case, to use again."""
        if copies < 2:
            raise ValueError(f"Rotation: expected at least 2 copies, got {copies}")
        self.case = case
        if shared is None:
            made = shared_arguments(case, device)
            shared = Shared({i: tensor.clone() for i, tensor in made.items()}, made)
        self.shared = shared
        seeds = range(copies)
        self.values = [_seeded(case, device, seed, shared.values) for seed in seeds]
        self.arguments = [_seeded(case, device, seed, shared.arguments) for seed in seeds]
        shapes = {_shapes(args) for args in (*self.values, *self.arguments)}
        if len(shapes) > 1:
            raise BenchmarkError(
                f"case {case.label!r}: make_inputs must return the same shapes at each call, "
                f"got {' and then '.join(sorted(map(str, shapes)))}"
            )
        self.device = device
        own = [a for i, a in enumerate(self.values[0]) if i not in shared.values]
        #: Bytes of the arguments that are a copy's own; each set of values takes as many.
        self.bytes_per_copy = sum(tensor.nbytes for tensor in _tensors(own))
        self._train = 0

    def advance(self) -> None:
        """Moves the values on by one copy; call it before every train."""
        self._train += 1
        copied = set()  # what copies have in common is copied once
        for i, args in enumerate(self.arguments):
            for argument, value in zip(_tensors(args), _tensors(self._values_in(i)), strict=True):
                if id(argument) not in copied:
                    _once(argument).copy_(_once(value))
                copied.add(id(argument))

    def copy_with(self, value: int) -> int:
        """Returns which copy now holds the set of values ``value``."""
        return (value - self._train) % len(self.values)

    def changed_argument(self, copy: int, writable: frozenset[int]) -> int | None:
        """Returns the position of an argument that lost its values, ``writable`` ones left out."""
        values, arguments = self._values_in(copy), self.arguments[copy]
        for position, (before, after) in enumerate(zip(values, arguments, strict=True)):
            pairs = zip(_tensors(before), _tensors(after), strict=True)
            if position not in writable and not all(_same(b, a) for b, a in pairs):
                return position
        return None

    def _values_in(self, copy: int) -> tuple[Any, ...]:
        return self.values[(copy + self._train) % len(self.values)]


class Random(NamedTuple):
    """A random tensor that is made later, see :func:`random_tensor`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, below: int | None = None
) -> torch.Tensor:
    """Makes the values that are timed by default: N(0, 1), or all integers of the dtype alike.

    Args:
        shape: the tensor's shape.
        dtype: any dtype; bools are drawn evenly too.
        device: where to make it.
        below: for indices, the size of the dim that they index.

    Example::

        x = random_tensor((4096, 14336), torch.bfloat16, torch.device("cuda"))
    """
    if dtype in CODES:
        low, high = CODES[dtype]["normal"]
        codes = torch.randint(low, high + 1, shape, dtype=torch.uint8, device=device)
        return codes.view(dtype)
    if dtype.is_floating_point and dtype.itemsize == 1:  # torch draws none
        return torch.randn(shape, device=device).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).to(dtype)
    limits = torch.iinfo(dtype)
    least, most = (0, max(1, below)) if below is not None else (limits.min, limits.max)
    most = min(most, 2**63 - 1)  # torch draws no larger ones
    return torch.randint(least, min(most, limits.max), shape, dtype=dtype, device=device)


def maker(arguments: tuple[Any, ...]) -> Callable[[torch.device], tuple[Any, ...]]:
    """Makes a ``make_inputs`` for a case; ``(shape, dtype)`` or :class:`Random` is a random tensor,
    a :class:`~cuda_ops.testing.samples.DeviceArg` the device.

    Example::

        BenchmarkCase("4096 float32", maker((((4096,), torch.float32), 0.5)), bytes=2 * 4096 * 4)
    """

    def make_inputs(device: torch.device) -> tuple[Any, ...]:
        def made(argument: Any) -> Any:
            if isinstance(argument, DeviceArg):
                return device
            if _is_description(argument):
                return random_tensor(argument[0], argument[1], device, *argument[2:])
            return argument

        return tuple(map(made, arguments))

    return make_inputs


def _is_description(argument: Any) -> bool:
    return isinstance(argument, Random) or (
        isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[1], torch.dtype)
    )


def shared_arguments(case: BenchmarkCase, device: torch.device) -> dict[int, torch.Tensor]:
    """Makes what all copies have in common, by position; the meta device is enough for its size."""
    if case.make_shared is None:
        return {}
    with _seed(device, _SHARED_SEED):
        return dict(case.make_shared(device))


def _seeded(
    case: BenchmarkCase, device: torch.device, seed: int, shared: Mapping[int, torch.Tensor]
) -> tuple[Any, ...]:
    with _seed(device, seed):
        own = tuple(case.make_inputs(device))
    for position in shared:
        if not 0 <= position < len(own) or own[position] is not None:
            raise BenchmarkError(
                f"case {case.label!r}: make_shared has argument {position}, where make_inputs must "
                f"have None among its {len(own)}"
            )
    return tuple(shared.get(i, argument) for i, argument in enumerate(own))


@contextmanager
def _seed(device: torch.device, seed: int) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _tensors(args: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def _shapes(args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in _tensors(args))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view with each element of memory once: an expanded dim is one element."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether two tensors have the same values, where NaN equals NaN."""
    a, b = _once(a), _once(b)
    if a.dtype.is_floating_point and a.dtype.itemsize == 1:  # torch compares none of these
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
