"""What is known about one operator after its library has been opened."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from cuda_ops.names import HOME, keyed
from cuda_ops.signature import Signature

#: How an operator behaves under ``torch.autocast``, in the words of PyTorch's autocast op
#: reference: one for all of its arguments, or by name for some, and the others stay as they are.
AutocastWord = Literal["lower_precision", "float32", "promote"]
AutocastPolicy = AutocastWord | Mapping[str, AutocastWord]

#: The Python function of each operator in this process, by key, filled as they are loaded.
functions: dict[str, Callable[..., Any]] = {}

#: The dtypes that a schema may have as a default, by torch's number for them.
_DTYPE_OF_CODE = dict(
    enumerate(
        (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
         torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
         torch.bool)
    )
) | {
    15: torch.bfloat16, 23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 27: torch.uint16,
    28: torch.uint32, 29: torch.uint64, 44: torch.float8_e8m0fnu, 45: torch.float4_e2m1fn_x2,
}  # fmt: skip


def default_of(argument: torch._C.Argument) -> Any:
    """Returns the default of a schema's argument; torch's parser gives a dtype as a number."""
    value = argument.default_value
    is_dtype = str(argument.real_type) in ("ScalarType", "Optional[ScalarType]")
    return _DTYPE_OF_CODE[value] if is_dtype and value is not None else value


def is_device(argument: torch._C.Argument) -> bool:
    """Says whether an argument is of type ``Device`` or ``Device?``."""
    return str(argument.real_type) in ("Device", "Optional[Device]")


def output_names(returns: Sequence[torch._C.Argument]) -> tuple[str, ...]:
    """Returns names for an operator's results: an unnamed single one is ``out``, several are
    ``out0, out1, ...``.
    """
    if len(returns) == 1:
        return (returns[0].name or "out",)
    return tuple(value.name or f"out{i}" for i, value in enumerate(returns))


#: Why results are not compared; the CPU kernel of two files alone is its own reference.
NO_REFERENCE = "no reference"
#: What is said of a gradient that differs from finite differences, and of one that is not compared.
WRONG_GRADIENT, UNCHECKED_GRADIENT = "WRONG", "not checked"
#: The largest int: a range that ends there has no end.
UNBOUNDED = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value of an int argument, or size of a named dim."""

    least: int
    most: int

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True)
class FloatRange:
    """The smallest and the largest value of a float argument."""

    least: float = -math.inf
    most: float = math.inf
    #: Whether ``least`` itself is left out.
    is_open: bool = False

    @property
    def lowest(self) -> float:
        """The smallest value that is in the range."""
        return math.nextafter(self.least, math.inf) if self.is_open else self.least

    @property
    def ordinary(self) -> float:
        """``least``, or a number above it that an operator's own dtype tells from it."""
        return self.least + max(0.5, abs(self.least) / 2) * self.is_open

    def __contains__(self, value: float) -> bool:
        return self.lowest <= value <= self.most


@dataclass(frozen=True)
class ResultDType:
    """The dtype of an output that need not have the first tensor's."""

    #: The argument that has the dtype, a tensor, or that is it; empty for none.
    like: str = ""
    #: The dtype where there is no such argument, or it is ``None``: a fixed one, or ``None`` for
    #: the first tensor's.
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class OpSpec:
    """One operator of one pair, as its binding's manifest declares it.

    A pair ``silu`` usually defines two: ``silu`` and ``silu_backward``.
    """

    #: Name without namespace, ``"silu_backward"``.
    name: str
    #: The pair that defines it, ``"silu"``.
    stem: str
    #: The schema as written in the binding, without namespace.
    schema: str
    #: The schema as torch parses it: argument and return names and types. A default that is a list
    #: has no hash.
    parsed: torch._C.FunctionSchema = field(hash=False)
    #: The generalized-ufunc signature line, or ``None`` if the binding gave none.
    signature: Signature | None
    #: The dtypes that its tensor arguments may have, all the same one; empty if the binding
    #: declared none. Arguments in ``dtypes_of`` have their own.
    dtypes: tuple[torch.dtype, ...]
    #: Docstring of the public function; may be empty.
    doc: str
    #: Dispatch keys that this build has kernels for: ``CPU``, ``CUDA``,
    #: ``CompositeImplicitAutograd``.
    keys: tuple[str, ...]
    #: Whether the binding has a CUDA entry, built or not.
    has_cuda: bool
    #: Whether a CPU can run torch's own operators in place of its kernel.
    by_torch: bool = False
    #: Operators that it calls, in C++ or in its gradients, as the binding names them.
    calls: tuple[str, ...] = ()
    #: Other operators of the same pair, by name; how ``<op>_backward`` is found.
    siblings: dict[str, OpSpec] = field(default_factory=dict, repr=False, compare=False)
    #: The namespace in the dispatcher, ``"cuda_ops"`` or that of its root.
    namespace: str = HOME
    #: Whether another library registers it, and the test kit or a guest's plugin describes it.
    foreign: bool = False
    #: The key of the guest that it is a function of, as a plugin describes it; empty if there is
    #: none.
    guest: str = ""
    #: By name, the dtypes of tensor and ``ScalarType`` arguments that have a list of their own.
    dtypes_of: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict, hash=False)
    #: By name, the ranges of int arguments and of named dims.
    ranges: Mapping[str, Range] = field(default_factory=dict, hash=False)
    #: By name, the ranges of float arguments.
    float_ranges: Mapping[str, FloatRange] = field(default_factory=dict, hash=False)
    #: By name, the dim that an int argument may not exceed.
    limits: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: By name, how many times a dim and the dim that this may not exceed: ``2r`` at most ``d``.
    dim_limits: Mapping[str, tuple[int, str]] = field(default_factory=dict, hash=False)
    #: The outputs that are there for the gradient alone, and have none themselves.
    saved: tuple[str, ...] = ()
    #: By name, the dtypes of outputs that need not have the first tensor's.
    results: Mapping[str, ResultDType] = field(default_factory=dict, hash=False)
    #: By name, what a str argument may be.
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    #: By name, the dim that an integer tensor holds indices of.
    belows: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: The outputs, its last ones, that ``cuda_ops.<op>`` does not return; they are saved too.
    hidden: tuple[str, ...] = ()
    #: The tensor arguments that have no gradient by design.
    no_gradient: tuple[str, ...] = ()
    #: The outputs that have none, beside those that are saved.
    no_gradient_outputs: tuple[str, ...] = ()
    #: The tensors that it is linear in while its other arguments stay as they are.
    linear: tuple[str, ...] = ()
    #: The names of its tags in ``torch.Tag``.
    tags: tuple[str, ...] = ()
    #: The devices where equal arguments may give other bits; an empty name is every device.
    nondeterministic: tuple[str, ...] = ()
    #: The tensor argument that holds a random key; empty if there is none.
    random: str = ""

    @property
    def qualname(self) -> str:
        """Name in the dispatcher, ``"cuda_ops::silu"``."""
        return f"{self.namespace}::{self.name}"

    @cached_property  # formulas ask for it at each call
    def key(self) -> str:
        """How strings name it: ``silu``, or ``my_ops::silu`` in another namespace."""
        return keyed(self.namespace, self.name)

    @property
    def pair(self) -> str:
        """The key of the pair that defines it."""
        return self.guest or keyed(self.namespace, self.stem)

    @property
    def declared_in(self) -> str:
        """The file that says what it is, for errors."""
        return f"ops/{self.stem}.py" if self.guest else f"{self.stem}.cpp"

    @property
    def overload(self) -> torch._ops.OpOverload[Any, Any]:
        """The dispatcher's handle, ``torch.ops.cuda_ops.silu.default``."""
        packet = getattr(getattr(torch.ops, self.namespace), self.name)
        overload: torch._ops.OpOverload[Any, Any] = packet.default
        return overload

    @property
    def function(self) -> Callable[..., Any]:
        """The operator as a Python function, ``cuda_ops.silu`` unless a plugin replaces that.

        Formulas and batching rules call it, since unlike the dispatcher's handle it works inside
        ``torch.func`` transforms.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.overload  # the same there, and traced without a look-up
        direct = None if self.foreign else functions.get(self.key)
        return self.overload if direct is None else direct

    @property
    def is_composite(self) -> bool:
        """Whether it is composed of other operators, from which gradients and shapes follow."""
        return "CompositeImplicitAutograd" in self.keys

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the arguments that it writes: ``Tensor(a!)`` in the schema."""
        return tuple(
            i
            for i, argument in enumerate(self.parsed.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )

    @property
    def written_text(self) -> str:
        """The names of the arguments that it writes, for errors."""
        return " and ".join(repr(self.argument_names[i]) for i in self.written)

    @property
    def draws(self) -> bool:
        """Whether its public function draws the random key. A gradient is given the one that its
        operator used.
        """
        takes_gradients = any(name.startswith("grad_") for name in self.argument_names)
        return bool(self.random) and not takes_gradients

    @cached_property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.parsed.arguments)

    @cached_property
    def tensor_positions(self) -> tuple[int, ...]:
        """Positions of the arguments of type ``Tensor`` and ``Tensor?``."""
        return tuple(
            i
            for i, argument in enumerate(self.parsed.arguments)
            if str(argument.type) in ("Tensor", "Optional[Tensor]")
        )

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the arguments of type ``Tensor`` and ``Tensor?``."""
        return tuple(self.argument_names[i] for i in self.tensor_positions)

    @property
    def device_position(self) -> int | None:
        """Position of the Device argument that says which kernel to call, where no tensor does."""
        if self.is_composite or any("Tensor" in str(a.type) for a in self.parsed.arguments):
            return None
        return next((i for i, a in enumerate(self.parsed.arguments) if is_device(a)), None)

    @property
    def int_positions(self) -> tuple[int, ...]:
        """Positions of the arguments of type ``int`` and ``int?``."""
        return tuple(
            i
            for i, argument in enumerate(self.parsed.arguments)
            if str(argument.real_type) in ("int", "Optional[int]")
        )

    @property
    def drawn_dims(self) -> tuple[str, ...]:
        """The dims of the signature line whose sizes can be chosen: those of its tensors or, where
        it has none, the int arguments that are sizes of outputs.
        """
        if self.signature is None:
            return ()
        return self.signature.names if self.tensor_positions else self.signature.int_names

    @property
    def dtype_names(self) -> tuple[str, ...]:
        """Names of the arguments of type ``ScalarType`` and ``ScalarType?``."""
        return tuple(
            argument.name
            for argument in self.parsed.arguments
            if str(argument.real_type) in ("ScalarType", "Optional[ScalarType]")
        )

    @property
    def sharing(self) -> tuple[str, ...]:
        """Names of the tensor arguments that share one dtype out of ``dtypes``."""
        return tuple(name for name in self.tensor_names if name not in self.dtypes_of)

    def allowed_dtypes(self, argument: str) -> tuple[torch.dtype, ...]:
        """Returns the dtypes of one tensor argument; empty if the binding declared none."""
        return self.dtypes_of.get(argument, self.dtypes)

    def output_dtypes(self, given: Mapping[str, torch.dtype]) -> tuple[torch.dtype, ...]:
        """Returns the dtype of each output.

        Args:
            given: by name, the dtypes of the tensor arguments of a call, and its ``ScalarType``
                arguments. Those that are ``None`` are left out.
        """
        first = next((given[name] for name in self.tensor_names if name in given), None)
        rules = [self.results.get(name, ResultDType()) for name in self.output_names]
        dtypes = [given.get(rule.like, rule.dtype or first) for rule in rules]
        # Without tensors each output has a rule of its own.
        return tuple(dtype for dtype in dtypes if dtype is not None)

    @property
    def shown(self) -> int:
        """How many outputs ``cuda_ops.<op>`` returns; they come first."""
        return len(self.output_names) - len(self.hidden)

    @property
    def constants(self) -> tuple[str, ...]:
        """The outputs that have no gradient by design, which autograd takes for constants."""
        return (*self.saved, *self.no_gradient_outputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return names, see :func:`output_names`."""
        return output_names(self.parsed.returns)


@dataclass(frozen=True)
class GuestOperator:
    """What a plugin says of one function of a guest, as the binding of a native pair says it.

    The answer to the hook ``cuda_ops_guest`` is a list of these. What a guest's module exports
    becomes an operator of its own by its schema, ``torch.ops.cuda_ops.<op>``, with arguments that
    are checked and whatever follows from the signature line. What the guest registers with
    ``TORCH_LIBRARY`` stays as it is, and is named; of the fields below, ``signature``, ``dtypes``,
    ``dtypes_of``, ``saved``, ``no_gradient``, ``nondeterministic`` and ``doc`` then tell the checks
    what it claims, and the others say nothing. Both are checked like any other operator.

    Example::

        GuestOperator(
            "lltm(Tensor x, Tensor weight) -> Tensor", "(b,i),(o,i)->(b,o)",
            function="forward", devices=("cuda",), dtypes=(torch.float32,),
        )
        GuestOperator("my_ops::mul", "(),()->()", dtypes=(torch.float32,))
    """

    #: The schema as a binding has it, its name the guest's or the guest's and more, ``lltm`` or
    #: ``lltm_backward``; or the name of an operator that the guest registers, ``my_ops::mul``.
    schema: str
    #: The signature line; empty if none describes it.
    signature: str = ""
    #: Where the function works: ``"cpu"``, ``"cuda"`` or both.
    devices: tuple[str, ...] = ()
    #: The dtypes that tensor arguments may have, all the same one.
    dtypes: tuple[torch.dtype, ...] = ()
    #: The function of the guest's module; without one ``backward`` for ``lltm_backward``, and for
    #: ``lltm`` the function ``lltm`` or ``forward``.
    function: str = ""
    #: Whether the function gets contiguous copies of tensors that are not, but for those that it
    #: writes.
    contiguous: bool = True
    #: The docstring of ``cuda_ops.<op>``.
    doc: str = ""
    #: By name, the dtypes of arguments that have a list of their own.
    dtypes_of: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    #: By name, the smallest and the largest value of arguments, or size of dims.
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    #: By name, what a str may be.
    one_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: By name, the dim that an int argument or another dim may not exceed.
    at_most: Mapping[str, str] = field(default_factory=dict)
    #: By name, the dim that an integer tensor holds indices of.
    below: Mapping[str, str] = field(default_factory=dict)
    #: By name, the dtypes of outputs that have not the first tensor's, or the argument that has it.
    returns: Mapping[str, torch.dtype | str] = field(default_factory=dict)
    #: The outputs that are there for the gradient alone.
    saved: tuple[str, ...] = ()
    #: The tensor arguments, and the outputs, that have no gradient by design.
    no_gradient: tuple[str, ...] = ()
    #: The devices where equal arguments may give other bits.
    nondeterministic: tuple[str, ...] = ()


@dataclass(frozen=True)
class Autograd:
    """A gradient formula, in the form of :func:`torch.library.register_autograd`.

    ``setup_context(ctx, inputs, output)`` saves what ``backward(ctx, *grads)`` needs.
    ``backward`` returns one gradient or ``None`` per argument of the operator. ``inputs`` are the
    positions of the arguments that have one, unless all floating arguments do; asking for another
    gradient is refused.
    """

    setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Callable[..., Any]
    inputs: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Claims:
    """What an operator promises to its tests beyond agreeing with its reference.

    Anything but the defaults needs a ``reason``.
    """

    #: The same arguments give the same bits on each call.
    deterministic: bool = True
    #: Factor on the tolerances of :mod:`cuda_ops.testing.compare`.
    tolerance: float = 1.0
    #: Intermediate values are kept in the dtype of the arguments, so sums are of rounded numbers,
    #: and a result of a wider dtype is no more exact than that.
    rounds_between: bool = False
    #: The dims of the signature line that one result is a sum over, where those that it lacks are
    #: not: a dim may be an index that is chosen, such as an expert.
    sums_over: tuple[str, ...] | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        defaults = (self.deterministic, self.tolerance, self.rounds_between, self.sums_over)
        if not self.reason and defaults != (True, 1.0, False, None):
            raise ValueError("Claims: give the reason why the defaults do not hold")


@dataclass(frozen=True)
class Peer:
    """A peer that must be imported, compiled or built before it can be called.

    ``load()`` returns the callable, or a :class:`~cuda_ops.benchmarking.choice.BestOf` of several.
    If it raises, say an ``ImportError`` since a package is not installed, the peer is listed as
    unavailable for that reason.

    A callable may have an attribute ``before``: it is called with the arguments of all calls before
    each train, outside of the time, and may bring weights into the layout that a package wants, as
    a user of it does once.
    """

    load: Callable[[], Callable[..., Any]]
    #: How far its integers may be from the reference, if it rounds by another rule.
    off_by: int = 0
    #: How many of its results, from the first on, are compared with the reference's; ``None`` for
    #: all. Indices are left out where any of several equal elements is right.
    compared: int | None = None


@dataclass(frozen=True)
class BenchmarkCase:
    """One point to measure: arguments for the operator, and the least that they cost."""

    #: The name in tables, unique among the operator's cases: ``"4096x4096 bfloat16"``.
    label: str
    #: Fresh arguments on a device, from torch's random numbers; the same shapes at each call.
    make_inputs: Callable[[torch.device], tuple[Any, ...]]
    #: Least memory traffic in bytes: every input read once, every output written once.
    bytes: int
    #: Arithmetic in floating-point operations, a multiply-add counting as two.
    flops: int = 0
    #: Keyword arguments for the operator, its reference and its peers.
    keywords: Mapping[str, Any] = field(default_factory=dict)
    #: The function to measure instead of the operator, for instance one that calls several.
    function: Callable[..., Any] | None = None
    #: More peers for this case than the operator's (``cuda_ops_peers``), by name.
    peers: Mapping[str, Callable[..., Any] | Peer] = field(default_factory=dict)
    #: Why this point is worth measuring, in a few words.
    reason: str = ""
    #: A part of the operator's cases that has a mean of its own in tables: ``"M >= 4096"``.
    group: str = ""
    #: The dtype that the case is about; ``None`` if there is none.
    dtype: torch.dtype | None = None
    #: The arithmetic unit of the ``flops``, which names their ceiling: ``"bf16"``, ``"fp16"``,
    #: ``"tf32"``, ``"fp32"`` or ``"fp64"``. Empty: the one of ``dtype``, without TF32.
    arithmetic: str = ""
    #: Time a step of training: the call, then the gradients of all floating arguments, with the
    #: results as incoming gradients. ``bytes`` and ``flops`` cover both.
    backward: bool = False
    #: On a GPU, also measure the device memory of a call, ours and the peers'.
    memory: bool = False
    #: Arguments that all calls share, by position, where ``make_inputs`` has ``None``: the matrices
    #: of a model, if more than one set would not fit. The reference gets them in their own dtype.
    #: Also called for the meta device, to learn their sizes. Not with ``backward``.
    make_shared: Callable[[torch.device], Mapping[int, torch.Tensor]] | None = None


@dataclass(frozen=True)
class Candidates:
    """What :func:`cuda_ops.runtime.tune` may choose among for an operator.

    The knobs are those of the binding, see ``src/utils/tuned.h``. The default, in which no knob is
    set, is always a candidate too and is called ``"default"``.
    """

    #: By name, the values of knobs; those that a candidate leaves out keep their defaults.
    settings: Mapping[str, Mapping[str, int]]
    #: From the operator's arguments, the rows and columns by which the binding reads its knobs;
    #: ``None`` for arguments that nothing is tuned for.
    sizes: Callable[..., tuple[int, int] | None]


#: One acceptable DTensor sharding: placements of the outputs, then of the arguments
#: (``None`` for an argument that is not a tensor).
ShardingRule = tuple[Sequence[Any], Sequence[Any]]
