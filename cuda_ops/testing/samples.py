"""Inputs to test an operator with, described before they exist.

Hypothesis draws the description (shapes, dtype, layouts, value mode, seed,
scalars); torch fills in the data from the seed. A description prints as one
line of Python that makes the same tensors again on any machine.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from hypothesis import strategies as st

from cuda_ops.dispatch.schema_types import schema_type
from cuda_ops.signature import Group
from cuda_ops.spec import FloatRange, OpSpec, Range, default_of, is_device
from cuda_ops.testing.arguments import each, sampled_arguments, spread
from cuda_ops.testing.values import VALUES, Values, make_tensor

Layout = Literal[
    "contiguous", "transposed", "sliced", "padded", "stepped", "expanded", "unfolded", "framed",
    "channels_last", "offset",
]  # fmt: skip
LAYOUTS: tuple[Layout, ...] = (
    "contiguous", "transposed", "sliced", "padded", "stepped", "expanded", "unfolded", "framed",
    "channels_last", "offset",
)  # fmt: skip
#: Several elements share memory, so torch lets nothing write to such a tensor.
OVERLAPPING: tuple[Layout, ...] = ("expanded", "unfolded", "framed")
#: Most elements of a tensor in a sample.
MAX_NUMEL = 4096
#: The same for the few samples that are large on purpose; their reference takes a second at most.
LARGEST_NUMEL = 1 << 20
# Odd and prime sizes, one warp, and just past powers of two.
_LOOP_SIZES = (1, 2, 3, 4, 5, 7, 13, 31, 32, 33, 64, 129, 257, 1031)
_CORE_SIZES = (1, 2, 3, 4, 5, 7, 13, 16, 17, 31, 33, 64)
#: Sizes of dims that results alone have, given by an int; an operator may refuse the negative one.
_OUTPUT_SIZES = (1, 2, 3, 5, 7, 17, 0, -1)
# One in this many samples is empty.
_EMPTY_EVERY = 8
# Numbers of loop dims; with 4, elementwise operators get channels_last tensors too.
LOOP_DIMS = (1, 2, 3, 4, 0)


def _short(value: Any) -> str:
    """Returns Python that makes a description again, without defaults and single quotes."""
    shown = [
        repr(part) if field.name in ("shape", "args") else f"{field.name}={part!r}"
        for field in fields(value)
        if (part := getattr(value, field.name)) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})".replace("'", '"')


@dataclass(frozen=True, repr=False)
class TensorArg:
    """One tensor without its data.

    ``TensorArg((7, 3), torch.bfloat16, "transposed")`` is a (7, 3) tensor with strides (1, 7).

    Raises:
        ValueError: the layout is not one of ``LAYOUTS``, or there cannot be that many distinct
            indices.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: Layout = "contiguous"
    #: For an integer tensor that indexes a dim: the size of that dim. Values are then drawn from
    #: ``range(below)``, and the checks also try what lies outside.
    below: int | None = None
    #: Such indices are all different, as those of an operator that writes to each: at most
    #: ``below`` of them, in any layout but ``OVERLAPPING`` ones.
    distinct: bool = False
    #: What to fill this tensor with, if not with what the sample says.
    values: Values | None = None

    __repr__ = _short

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(
                f"TensorArg: argument 'layout': expected one of {', '.join(LAYOUTS)}, "
                f"got {self.layout!r}"
            )
        room = 0 if self.below is None else self.below
        if self.distinct and (math.prod(self.shape) > room or self.layout in OVERLAPPING):
            raise ValueError(
                "TensorArg: argument 'distinct': expected at most 'below' elements, not "
                f"{' or '.join(OVERLAPPING)}, "
                f"got shape {self.shape}, below={self.below}, layout={self.layout!r}"
            )


@dataclass(frozen=True)
class DeviceArg:
    """The device that a sample is made on."""


@dataclass(frozen=True, repr=False)
class Sample:
    """The arguments of one call; ``repr`` is the line that reproduces it.

    ``args`` holds a :class:`TensorArg` for every tensor, a :class:`DeviceArg` for the device of the
    run, and everything else as it is, in the order of the schema. Arguments left out at the
    end keep their defaults. Two tensors and a number: ``Sample((TensorArg((5,)),
    TensorArg((5,)), 0.5), values="special")``.
    """

    args: tuple[Any, ...]
    values: Values = "normal"
    seed: int = 0

    __repr__ = _short

    @staticmethod
    def parse(line: str) -> Sample:
        """Returns the sample that prints as ``line``.

        Raises:
            ValueError: the line is something else.
        """
        known = {"Sample": Sample, "TensorArg": TensorArg, "DeviceArg": DeviceArg}
        numbers = {"inf": math.inf, "nan": math.nan}
        try:
            _refuse_code(ast.parse(line, mode="eval").body, known, numbers)
            sample = eval(line, {"__builtins__": {}, "torch": torch, **known, **numbers})
        except Exception as error:
            raise ValueError(f"{line!r} does not describe a sample: {error}") from error
        if not isinstance(sample, Sample):
            raise ValueError(f"{line!r} does not describe a sample")
        if not isinstance(sample.args, tuple):
            raise ValueError(
                f"{line!r} does not describe a sample: its arguments are not a tuple; "
                "a single one needs a comma, Sample((x,))"
            )
        return sample

    def make(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """Makes the arguments, with the same values on every device."""
        generator = torch.Generator().manual_seed(self.seed)

        def made(arg: Any) -> Any:
            if isinstance(arg, TensorArg):
                values = arg.values or self.values
                return make_tensor(arg, values, generator, torch.device(device))
            if isinstance(arg, DeviceArg):
                return torch.device(device)
            return arg

        return tuple(each(made, arg) for arg in self.args)

    @property
    def tensors(self) -> tuple[TensorArg, ...]:
        return tuple(arg for arg in spread(self.args) if isinstance(arg, TensorArg))

    @property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(math.prod(arg.shape) for arg in self.tensors)

    @property
    def size(self) -> tuple[int, int]:
        """What makes one sample simpler to read than another."""
        return self.numel, len(repr(self))

    def with_tensors(
        self, change: Callable[[TensorArg], TensorArg], values: Values | None = None
    ) -> Sample:
        """Returns the same call with every tensor's description changed."""

        def changed(arg: Any) -> Any:
            return change(arg) if isinstance(arg, TensorArg) else arg

        args = tuple(each(changed, arg) for arg in self.args)
        return Sample(args, values or self.values, self.seed)


# --- what may be drawn ---------------------------------------------------------------


#: What a sample's line consists of, beside calls and names.
_PLAIN = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.BinOp, ast.keyword,
          ast.expr_context, ast.Add, ast.Sub, ast.unaryop)  # fmt: skip


def _refuse_code(node: ast.AST, calls: Container[str], names: Container[str]) -> None:
    """Refuses what no sample prints, since a line may come from a stranger, in a report.

    Raises:
        ValueError: there is something else than numbers, strings, tuples, lists, dicts, dtypes and
            the like of torch, and the given calls and names.
    """
    inner = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        fine = isinstance(node.func, ast.Name) and node.func.id in calls
        inner = [*node.args, *node.keywords]
    elif isinstance(node, ast.Attribute):
        kinds = (torch.dtype, torch.layout, torch.memory_format)
        of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        fine = of_torch and isinstance(getattr(torch, node.attr, None), kinds)
        inner = []
    elif isinstance(node, ast.Name):
        fine = node.id in names
    else:
        fine = isinstance(node, _PLAIN)
    if not fine:
        raise ValueError(f"expected a sample and nothing else, got {ast.unparse(node)}")
    for child in inner:
        _refuse_code(child, calls, names)


@functools.cache
def strategy(op: OpSpec) -> st.SearchStrategy[Sample] | None:
    """Returns samples that fit the operator's schema and signature.

    Tensors have at most 4096 elements and dtypes that the operator takes, by default float32.

    Returns:
        A strategy to draw from or to filter; ``None`` without a signature, or if an argument is
        neither a tensor nor a number, nor a dtype or a str with a list, and has no default.

    Example::

        strategy(op).filter(lambda sample: sample.args[-1] != 0)
    """
    if op.signature is None:
        return None
    scalars = {
        i: _scalar(op, argument)
        for i, argument in enumerate(sampled_arguments(op))
        if i not in op.tensor_positions
    }
    known = {i: scalar for i, scalar in scalars.items() if scalar is not None}
    return _draw_sample(op, known) if len(known) == len(scalars) else None


def undrawn(op: OpSpec) -> str | None:
    """Returns the type and the name of an argument for which :func:`strategy` has no values, if the
    operator has a signature line.
    """
    for i, argument in enumerate(sampled_arguments(op) if op.signature is not None else ()):
        if i not in op.tensor_positions and _scalar(op, argument) is None:
            return f"{schema_type(argument)} '{argument.name}'"
    return None


@st.composite
def _draw_sample(draw: st.DrawFn, op: OpSpec, scalars: dict[int, st.SearchStrategy[Any]]) -> Sample:
    assert op.signature is not None
    groups = op.signature.inputs
    core = dict.fromkeys((*op.signature.names, *op.signature.int_names), 1)
    ranges = {name: op.ranges.get(name, Range(0, MAX_NUMEL)) for name in op.drawn_dims}

    def room_beside(fitted: Iterable[Group]) -> int:
        taken: list[int] = [math.prod(group.shape((), core)) for group in fitted]
        return max(1, MAX_NUMEL // max([1, *taken]))

    everything = (*groups, *op.signature.outputs)
    sizes = _CORE_SIZES if op.tensor_positions else _LOOP_SIZES
    for name in op.drawn_dims:
        room = room_beside(group for group in everything if name in group.names)
        fitting = [size for size in sizes if size <= room]
        fitting = [size for size in fitting if size in ranges[name]] or [ranges[name].least]
        core[name] = draw(st.sampled_from(fitting), label=name)
    room = room_beside(everything)
    loop: list[int] = []
    for _ in range(draw(st.sampled_from(LOOP_DIMS if op.tensor_positions else (0,)))):
        fitting = [size for size in _LOOP_SIZES if size * math.prod(loop) <= room]
        loop.append(draw(st.sampled_from(fitting)))
    if draw(st.integers(1, _EMPTY_EVERY)) == _EMPTY_EVERY:
        emptied = may_be_empty(op)
        at = draw(st.integers(0, len(loop) + len(emptied)))
        if at < len(loop):
            loop[at] = 0
        elif at < len(loop) + len(emptied):
            core[emptied[at - len(loop)]] = 0
    core = limited(op, core)
    shared = draw(st.sampled_from(op.dtypes or (torch.float32,)))

    def tensor(group: Group, name: str) -> TensorArg:
        own = list(loop)
        is_written = op.argument_names.index(name) in op.written
        may_broadcast = group.loops and len(op.tensor_positions) > 1 and not is_written
        if may_broadcast and draw(st.booleans()):
            # Broadcast: leave out leading dims, make others 1.
            own = own[draw(st.integers(0, len(own))) :]
            own = [size if draw(st.booleans()) else 1 for size in own]
        shape = group.shape(tuple(own), core)
        own_dtypes = op.dtypes_of.get(name)
        dtype = draw(st.sampled_from(own_dtypes)) if own_dtypes else shared
        layouts = [one for one in layouts_of(shape) if not (is_written and one in OVERLAPPING)]
        return TensorArg(
            shape, dtype, draw(st.sampled_from(layouts)), core.get(op.belows.get(name, ""))
        )

    args: list[Any] = []
    remaining = iter(groups)
    for i, argument in enumerate(sampled_arguments(op)):
        if argument.name in op.drawn_dims and not op.tensor_positions:
            args.append(core[argument.name])
        elif i in scalars:
            args.append(within_limit(op, argument.name, draw(scalars[i]), core))
        else:
            drawn = tensor(next(remaining), argument.name)
            optional = str(argument.type) == "Optional[Tensor]"
            args.append(None if optional and draw(st.booleans()) else drawn)
    return Sample(tuple(args), draw(st.sampled_from(VALUES)), draw(st.integers(0, 2**16)))


def may_be_empty(op: OpSpec) -> list[str]:
    """Returns the core dims that may have size 0: in their range, and no index counts in them,
    as none is below 0.
    """
    dims = [dim for dim in op.drawn_dims if dim not in op.belows.values()]
    return [dim for dim in dims if dim not in op.ranges or 0 in op.ranges[dim]]


def limited(op: OpSpec, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes, those smaller that would exceed others."""
    fitted = dict(sizes)
    for dim, (times, limit) in op.dim_limits.items():
        fitted[dim] = min(fitted[dim], fitted[limit] // times)
    return fitted


def within_limit(op: OpSpec, name: str, value: Any, sizes: Mapping[str, int]) -> Any:
    """Returns an int no larger than the dim that it may not exceed; anything else as it is."""
    most = sizes.get(op.limits.get(name, ""))
    return value if most is None or not isinstance(value, int) else min(value, most)


#: The dims that a layout needs, to differ from others.
LEAST_DIMS: dict[Layout, int] = {
    "transposed": 2, "sliced": 1, "padded": 2, "stepped": 1, "expanded": 1, "unfolded": 2,
    "framed": 3, "channels_last": 4,
}  # fmt: skip


def layouts_of(shape: tuple[int, ...]) -> list[Layout]:
    """Returns the layouts that differ from others for a tensor of this shape."""
    dims = len(shape)
    return [
        layout
        for layout in LAYOUTS
        if (dims == 4 if layout == "channels_last" else dims >= LEAST_DIMS.get(layout, 0))
    ]


def _scalar(op: OpSpec, argument: Any) -> st.SearchStrategy[Any] | None:
    allowed, dtypes = op.ranges.get(argument.name), op.dtypes_of.get(argument.name)
    kind = str(argument.real_type)
    within = op.float_ranges.get(argument.name, FloatRange())
    numbers = [v for v in (0.0, 1.0, -1.0, 0.5, 2.0, -3.25) if v in within]
    ends = (within.least, within.most)
    numbers += [end for end in ends if math.isfinite(end) and end in within and end not in numbers]
    numbers = numbers or [within.ordinary]
    plain = kind.removeprefix("Optional[").removesuffix("]")
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "float": st.sampled_from(numbers),
        "int": st.integers(allowed.least, min(allowed.most, allowed.least + 7))
        if allowed
        else st.integers(-2, 5),
        "bool": st.booleans(),
    }
    if op.signature is not None and argument.name in op.signature.int_names:
        sizes = [size for size in _OUTPUT_SIZES if allowed is None or size in allowed]
        drawn["int"] = st.sampled_from(sizes or [allowed.least if allowed else 1])
    if dtypes:
        drawn["ScalarType"] = st.sampled_from(dtypes)
    if argument.name in op.choices:
        drawn["str"] = st.sampled_from(op.choices[argument.name])
    if is_device(argument) and (op.device_position is not None or plain == kind):
        return st.just(DeviceArg())
    if plain not in drawn:
        return st.just(default_of(argument)) if argument.has_default_value() else None
    return st.one_of(st.none(), drawn[plain]) if plain != kind else drawn[plain]
