"""Checks what was timed: the outputs of every train against the float64 reference.

Each result must be within the table of tolerances, and all together within a few epsilons: the
first finds a single wrong one, the second a part left out of long sums, where the table must allow
much.

The reference is computed for two of the sets of values that move round among the copies, so any
call of a train may be the one that is looked at. Large outputs are compared at positions drawn at
random, ends included; if loop dims make parts independent of each other, the reference computes
only parts drawn at random. All memory that comes back is checked in another way: it is overwritten
before it is given up, so what a kernel leaves out stays wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cuda_ops.derive.arguments import bind, loop_dims, rows_are_independent, tensor_arguments
from cuda_ops.derive.layout import broadcast
from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import OpSpec, Peer
from cuda_ops.testing import compare
from cuda_ops.testing.samples import DeviceArg, Sample, TensorArg
from cuda_ops.testing.tolerance import (
    PAIRS,
    epsilon,
    errors,
    is_floating,
    largest,
    size_of,
    tensors,
)

from .rotation import Rotation

#: Elements of an output that are compared after each train, at most.
MOST_COMPARED = 2**18
#: Elements of an output that the reference computes, at most, if loop dims allow a choice.
MOST_COMPUTED = 2**20
_PARTS = 8
#: Above this many FLOPs, or bytes of arguments if it cannot compute parts alone, the reference runs
#: on the measured device, still in float64: on a CPU it would take longer than all timing does.
_EXPENSIVE_FLOPS, _EXPENSIVE_BYTES = 10**10, 2**24
#: From this many results on, their root mean square says how large they are; that of few may be
#: small by chance.
_MANY = 1024
# Seeded by the operating system, so that an operator cannot know what is looked at.
_CHANCE = torch.Generator()
_CHANCE.seed()


class Verifier:
    """The expected results of one case, and the comparison with them."""

    def __init__(
        self,
        op: OpSpec,
        reference: Callable[..., Any],
        rotation: Rotation,
        tolerance: float = 1.0,
    ) -> None:
        """Computes the expected results; ``tolerance`` is the factor that the operator claims."""
        self._op, self._rotation, self._tolerance = op, rotation, tolerance
        self._writable = frozenset(op.written)
        chosen = torch.randperm(len(rotation.values), generator=_CHANCE)[:2].tolist()
        # Gradients of broadcast arguments are sums over all parts.
        whole = rotation.case.backward
        self._parts = None if whole else _draw_parts(op, rotation.values[0])
        few = self._parts is not None or (
            rotation.bytes_per_copy <= _EXPENSIVE_BYTES and not rotation.shared.values
        )
        # The derived reference is the operator's CPU kernel; on the device it would be itself.
        own = getattr(reference, "func", reference) is op.overload  # perhaps with keywords
        on_cpu = (rotation.case.flops <= _EXPENSIVE_FLOPS and few) or own
        self._device = torch.device("cpu") if on_cpu else rotation.device
        self._length = compare.reduction_length(op, shapes_of(rotation.values[0]))
        if isinstance(reference, partial):
            keywords = reference.keywords.items()
            on = {n: self._device if isinstance(v, DeviceArg) else v for n, v in keywords}
            reference = partial(reference.func, *reference.args, **on)
        self._expected = {value: self._compute(reference, value) for value in chosen}
        self._positions: dict[int, torch.Tensor] = {}

    def _compute(self, reference: Callable[..., Any], value: int) -> tuple[Any, float]:
        args = self._rotation.values[value]
        if self._parts is not None:
            args = self._parts.of_arguments(args)
        shared = self._rotation.shared.values  # too large to have in float64 as well
        here = [v.to(self._device) if isinstance(v, torch.Tensor) else v for v in args]
        here = [self._device if isinstance(v, torch.device) else v for v in here]
        wide = compare.widened(self._op, reference, here)
        wide = [here[i] if i in shared else arg for i, arg in enumerate(wide)]
        expected = reference(*wide)
        if self._length > 1:
            magnitudes = [size_of(v) if is_floating(v) else v for v in wide]
            return expected, largest(compare.outputs(reference(*magnitudes)))
        numbers = tensors(wide) or compare.outputs(expected)
        return expected, min(1.0, largest(numbers))

    def check(self, outputs: Sequence[Any], peer: Peer | None = None) -> float:
        """Compares a train's outputs; returns the largest error in units of the tolerance.

        A ``peer`` says how far its outputs are compared.

        Raises:
            BenchmarkError: a result is wrong, an output is not a plain tensor or has no memory of
                its own, or an argument has changed.
        """
        _check_memory(outputs, self._rotation.arguments, bool(self._writable))
        worst = 0.0
        for value, (expected, magnitude) in self._expected.items():
            copy = self._rotation.copy_with(value)
            position = self._rotation.changed_argument(copy, self._writable)
            if position is not None:
                name = self._op.argument_names[position]
                raise BenchmarkError(f"changes its argument {name!r}, which its schema denies")
            worst = max(worst, self._compare(outputs[copy], expected, magnitude, peer))
        return worst

    def _compare(self, output: Any, expected: Any, magnitude: float, peer: Peer | None) -> float:
        worst = 0.0
        off_by, compared = (peer.off_by, peer.compared) if peer else (0, None)
        actuals, expecteds = compare.without_hidden(
            self._op, compare.outputs(output), compare.outputs(expected)
        )
        if len(actuals) != len(expecteds):
            raise BenchmarkError(f"returns {len(actuals)} results, expected {len(expecteds)}")
        pairs = list(zip(actuals, expecteds, strict=True))[:compared]
        for i, (a, e) in enumerate(pairs):
            if self._parts is not None:
                a = self._parts.of_tensor(a)
            if a.shape != e.shape:
                raise BenchmarkError(f"returns shape {list(a.shape)}, expected {list(e.shape)}")
            if a.numel() > MOST_COMPARED:
                at = self._positions.setdefault(i, _draw_positions(a.numel()))
                a, e = _taken(a, at), _taken(e, at)
            if off_by and not a.is_floating_point():
                a, e = a.cpu().to(torch.int64), e.cpu().to(torch.int64)
                a = torch.where((a - e).abs() <= off_by, e, a)
            try:
                factor = self._tolerance
                error = errors([a], [e], magnitude, self._length, factor=factor)
                worst = max(worst, error)
                spread = self._spread(a, e, magnitude)
            except AssertionError as error:  # integers differ
                raise BenchmarkError(str(error)) from error
            if not spread <= 1:
                raise BenchmarkError(
                    f"differs from the reference by {spread:.3g} times what rounding explains, "
                    "by the root mean square"
                )
        if not worst <= 1:
            raise BenchmarkError(f"differs from the reference by {worst:.3g} times the tolerance")
        return worst

    def _spread(self, actual: torch.Tensor, expected: torch.Tensor, magnitude: float) -> float:
        """Returns the root mean square of the errors, relative to that of the results, in units of
        what the table allows one of them. Rounding errors of long sums cancel, omissions do not.
        """
        if not is_floating(actual) or not actual.numel():
            return 0.0
        a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
        known = a.isfinite() & e.isfinite()
        error, size = (v[known].square().mean().sqrt().item() for v in (a - e, e))
        if a.numel() < _MANY:
            size = max(size, magnitude / math.sqrt(self._length))
        inputs = [v.dtype for v in self._rotation.values[0] if is_floating(v)]
        unit = max(epsilon(dtype) for dtype in (actual.dtype, *inputs))
        return error / (self._tolerance * unit * size) if error else 0.0


def poison(outputs: Sequence[Any]) -> None:
    """Overwrites results that are not needed any more: the next ones in this memory start wrong."""
    for output in outputs:
        for tensor in compare.outputs(output):
            if isinstance(tensor, torch.Tensor):
                if tensor.dtype == PAIRS:
                    tensor = tensor.view(torch.uint8)
                tensor.fill_(math.nan if tensor.is_floating_point() else 1)


def _check_memory(
    outputs: Sequence[Any], arguments: Sequence[tuple[Any, ...]], may_write: bool
) -> None:
    starts: set[int] = set()
    if not may_write:
        starts |= {a.data_ptr() for args in arguments for a in args if isinstance(a, torch.Tensor)}
    for output in outputs:
        for tensor in compare.outputs(output):
            if type(tensor) is not torch.Tensor:
                raise BenchmarkError(
                    f"returns {type(tensor).__name__}, expected a plain Tensor: work may be left"
                )
            if tensor.numel() and not may_write:
                if tensor.data_ptr() in starts:
                    raise BenchmarkError(
                        "returns memory that an argument or another result still uses"
                    )
                starts.add(tensor.data_ptr())


def _taken(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    # torch takes no elements of float8.
    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return torch.take(bits, at.to(tensor.device)).view(tensor.dtype)


class _Shapes(Sample):
    """Arguments without data, for code that needs their shapes alone."""

    def make(self, device: torch.device | str = "meta") -> tuple[Any, ...]:
        return tuple(
            torch.empty(arg.shape, dtype=arg.dtype, device="meta")
            if isinstance(arg, TensorArg)
            else arg
            for arg in self.args
        )


def shapes_of(args: Sequence[Any]) -> Sample:
    """Returns the shapes and dtypes of a call's arguments: a sample whose tensors have no data."""
    return _Shapes(
        tuple(
            TensorArg(tuple(arg.shape), arg.dtype) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        )
    )


class _Parts:
    """Slices of the first loop dim, joined."""

    def __init__(self, op: OpSpec, rank: int, size: int, slices: list[tuple[int, int]]) -> None:
        self._op, self._rank, self._size, self._slices = op, rank, size, slices

    def of_arguments(self, args: Sequence[Any]) -> tuple[Any, ...]:
        positions = self._op.tensor_positions
        return tuple(
            self.of_tensor(arg, len(loop_dims(self._op, positions.index(i), arg.shape)))
            if i in positions and arg is not None
            else arg
            for i, arg in enumerate(args)
        )

    def of_tensor(self, tensor: torch.Tensor, loops: int | None = None) -> torch.Tensor:
        if (loops is not None and loops < self._rank) or tensor.shape[0] != self._size:
            return tensor  # broadcast along it
        return torch.cat([tensor.narrow(0, start, length) for start, length in self._slices])


def _draw_parts(op: OpSpec, args: tuple[Any, ...]) -> _Parts | None:
    """Draws parts of the first loop dim, first and last included; ``None`` to take everything."""
    if op.signature is None or op.parsed.is_mutable or not op.tensor_positions:
        return None
    if not rows_are_independent(op) or not all(group.loops for group in op.signature.outputs):
        return None
    values = bind(op, args, {})
    loop = broadcast(op, tensor_arguments(op, values))
    numel = max(values[i].numel() for i in op.tensor_positions if values[i] is not None)
    if not loop or numel <= MOST_COMPUTED:
        return None
    length = max(1, MOST_COMPUTED * loop[0] // numel // _PARTS)
    if length * _PARTS >= loop[0]:
        return None
    last = loop[0] - length
    between = torch.randint(0, last + 1, (_PARTS - 2,), generator=_CHANCE).tolist()
    starts = sorted([0, *between, last])  # so that the end of the output stays the end
    return _Parts(op, len(loop), loop[0], [(start, length) for start in starts])


def _draw_positions(numel: int) -> torch.Tensor:
    positions = torch.randint(0, numel, (MOST_COMPARED,), generator=_CHANCE)
    positions[0], positions[-1] = 0, numel - 1
    return positions
